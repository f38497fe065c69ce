"""Four ranks over gloo: layouts that combine two kinds of parallelism equal those without swapping to the bit."""

from __future__ import annotations

import pytest

from megatron.swap.common.types import GIB
from tests.integration.harness import SWAP_SMALL, Trainer, assert_same_training, assert_swapped, recorded
from tests.integration.test_parallel import MOE

LAYOUTS = [
    pytest.param("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8", id="tp2-pp2"),
    pytest.param(
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8", id="pp4-vpp2"
    ),
    pytest.param(
        f"{MOE} --expert-model-parallel-size 2 --global-batch-size 8 --use-distributed-optimizer", id="ep2-dp2"
    ),
]
STEPS = "--train-iters 16 --lr-decay-iters 16"
"""Enough for a plan, and for three smaller budgets if measured peaks are above it."""


@pytest.mark.supports("--bf16 --swap-layers all --swap-optimizer 0.5", ranks=4)
@pytest.mark.parametrize("flags", LAYOUTS)
def test_swapped_with_optimizer_state(trainer: Trainer, flags: str) -> None:
    flags += " --bf16"
    plain = trainer.unswapped(flags, ranks=4)
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-layers all --swap-optimizer 0.5 {recorded('torch')}", ranks=4)
    assert_same_training(plain, run)
    assert_swapped(run)
    assert run.summary["num_ranks"] == 4
    assert all(rank["optimizer_host_bytes"] > 0 for rank in run.summary["ranks"])


@pytest.mark.supports("--bf16 --swap-memory-gib 1 --swap-optimizer auto", ranks=4)
@pytest.mark.parametrize("flags", LAYOUTS)
def test_planned(trainer: Trainer, flags: str) -> None:
    """Each stage plans its own layers; the plans of all ranks take effect at the same step."""
    flags += f" --bf16 {STEPS}"
    plain = trainer.unswapped(flags, ranks=4)
    held_gib = plain.summary["saved_peak_bytes"] / GIB
    run = trainer.run(
        f"{flags} {SWAP_SMALL} --swap-memory-gib {0.9 * held_gib} --swap-optimizer auto "
        f"--swap-max-candidates 1 {recorded('torch')}", ranks=4
    )
    assert_same_training(plain, run)
    assert run.summary["planning"]["stages"][-1]["stage"] == "stable"
    assert sum(step["swapped_out_bytes"] + step["recomputed_bytes"] for step in run.summary["steps"]) > 0
    if "--pipeline" in flags:
        assert len({tuple(rank["swapped_layers"]) for rank in run.summary["ranks"]}) > 1
