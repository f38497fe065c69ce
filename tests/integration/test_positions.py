"""Megatron's flags for rotary positions, at long lengths and others: equal to the bit, swapped and recomputed."""

from __future__ import annotations

import pytest

from tests.integration.harness import Trainer, assert_swaps_to_the_end

GROUPED = "--group-query-attention --num-query-groups 2"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16"
INTERPOLATED = "--rotary-seq-len-interpolation-factor 2"
POSITIONS = [
    f"--use-rope-scaling --rotary-base 500000 {GROUPED}",
    "--use-rope-scaling --rotary-percent 0.5 --rotary-interleaved",
    f"{YARN} --rotary-base 500000",  # Megatron refuses it interleaved
    f"{YARN} --mscale 0.7 --rotary-percent 0.5 {GROUPED}",
    f"{INTERPOLATED} --rotary-base 500000 --rotary-percent 0.5",
    f"{INTERPOLATED} --rotary-interleaved {GROUPED}",
]
"""Each kind of scaling beside each value of the other flags at least once."""
IDS = ["scaled-base-grouped", "scaled-half-interleaved", "yarn-base", "yarn-half-grouped",
       "interpolated-base-half", "interpolated-interleaved-grouped"]  # fmt: skip


@pytest.mark.supports("--swap-layers all --swap-recompute rotary")
@pytest.mark.parametrize("flags", POSITIONS, ids=IDS)
def test_equal_to_the_bit(trainer: Trainer, flags: str) -> None:
    _, run = trainer.pair(flags, "--swap-layers all --swap-recompute rotary --swap-verify")
    assert_swaps_to_the_end(run)
    assert run.summary["recompute_refused"] == []
    assert run.summary["recomputed_bytes"] > 0


def test_every_flag_changes_the_positions(trainer: Trainer) -> None:
    """A flag that has no effect would make the tests above pass too."""
    singles = ["", "--use-rope-scaling", "--rotary-base 500000", "--rotary-percent 0.5", "--rotary-interleaved",
               INTERPOLATED, YARN, f"{YARN} --mscale 0.7"]  # fmt: skip
    losses = [tuple(trainer.unswapped(flags).summary["losses"]) for flags in singles]
    assert len(set(losses)) == len(singles)


def test_a_scaling_that_megatron_ignores_is_told(trainer: Trainer) -> None:
    scaled = trainer.unswapped("--use-rope-scaling")
    run = trainer.run("--use-rope-scaling --rope-scaling-factor 32 --swap-summary summary.json")
    assert "swap: --rope-scaling-factor 32 has no effect: Megatron's trainer scales by 8." in run.output
    assert "--rope-scaling-factor" not in scaled.output.split("swap:")[-1]
    assert run.summary["losses"] == scaled.summary["losses"]
