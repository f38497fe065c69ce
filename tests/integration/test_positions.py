"""Megatron's flags for rotary positions: each one has an effect, or it is told."""

from __future__ import annotations

from tests.integration.harness import Trainer
from tests.integration.rows import INTERPOLATED, YARN


def test_every_flag_changes_the_positions(trainer: Trainer) -> None:
    """A flag that has no effect would make the tests above pass too."""
    singles = ["", "--use-rope-scaling", "--rotary-base 500000", "--rotary-percent 0.5", "--rotary-interleaved",
               INTERPOLATED, YARN, f"{YARN} --mscale 0.7"]  # fmt: skip
    losses = [tuple(trainer.unswapped(flags).summary["losses"]) for flags in singles]
    assert len(set(losses)) == len(singles)


def test_a_scaling_that_megatron_ignores_is_told(trainer: Trainer) -> None:
    scaled = trainer.unswapped("--use-rope-scaling")
    run = trainer.live("--use-rope-scaling --rope-scaling-factor 32")
    assert "swap: --rope-scaling-factor 32 has no effect: Megatron's trainer scales by 8." in run.output
    assert "--rope-scaling-factor" not in scaled.output.split("swap:")[-1]
    assert run.summary["losses"] == scaled.summary["losses"]
