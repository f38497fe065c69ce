"""Linear layers that add weight gradients to ``main_grad`` themselves: hooks around them change no bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.harness import SAVE, SWAP_SMALL, Run, Trainer, assert_same_checkpoints

FUSING = Path(__file__).with_name("fusing_script.py")
FUSION = f"^--no-gradient-accumulation-fusion --bf16 {SAVE['torch'].format('checkpoint')}"
OVERLAP = "--overlap-grad-reduce"
TWICE = "--global-batch-size 8"
NUM_ADDED = 3 * 2 * (8 * 4 + 1)
"""Number of additions: steps, times micro-batches, times linear layers."""
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def num_added(run: Run) -> set[int]:
    """Return the number of additions by each rank."""
    return {int(number) for number in re.findall(r"weight gradients added: (\d+)", run.output)}


@pytest.mark.supports("--bf16 --swap-layers 0-3 --swap-recompute norm activation rotary linear")
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("", 1, id="alone"),
        pytest.param(OVERLAP, 1, id="overlap"),
        pytest.param(f"{OVERLAP} --use-distributed-optimizer {TWICE}", 2, id="dp2-overlap-distributed-optimizer"),
        pytest.param(f"{OVERLAP} --untie-embeddings-and-output-weights {TWICE}", 2, id="dp2-overlap-untied"),
    ],
)
def test_equal_to_a_run_without_hooks(trainer: Trainer, flags: str, ranks: int) -> None:
    plain = trainer.run(f"{FUSION} {flags}", ranks=ranks, program=FUSING)
    assert num_added(plain) == {NUM_ADDED}
    for swap in (
        "--swap-summary summary.json",
        "--swap-layers all",
        "--swap-layers 0-3 --swap-recompute norm activation rotary linear",
    ):
        run = trainer.run(f"{FUSION} {flags} {SWAP_SMALL} {swap}", ranks=ranks, program=FUSING)
        assert num_added(run) == {NUM_ADDED}
        assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")


@pytest.mark.supports(f"--bf16 {OVERLAP} {FULL} --swap-layers all")
def test_with_full_recomputation(trainer: Trainer) -> None:
    plain = trainer.run(f"{FUSION} {OVERLAP} {FULL}", program=FUSING)
    run = trainer.run(f"{FUSION} {OVERLAP} {FULL} {SWAP_SMALL} --swap-layers all", program=FUSING)
    assert num_added(plain) == num_added(run) == {NUM_ADDED}
    assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")
