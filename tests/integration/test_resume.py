"""Save and resume with swapping: the result equals one run without swapping."""

from __future__ import annotations

import pytest

from tests.integration.harness import (
    SWAP_SMALL,
    Trainer,
    assert_same_checkpoints,
    assert_swapped,
    recorded,
)


@pytest.mark.supports("--swap-layers all")
@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        pytest.param("--attention-dropout 0.1 --hidden-dropout 0.1", "torch", id="dropout", marks=pytest.mark.short),
        pytest.param("--bf16", "torch_dist", id="bf16-torch_dist"),
    ],
)
def test_resumed_with_swapping(trainer: Trainer, flags: str, saved: str) -> None:
    flags = f"--train-iters 4 {flags}"
    whole = trainer.unswapped(flags, saved=saved)
    swap = f"{flags} {SWAP_SMALL} --swap-layers all {recorded(saved)}"
    first = trainer.run(f"{swap} --exit-interval 2")
    second = trainer.run(f"{swap} --load {first.directory / 'checkpoint'}")
    assert_swapped(first)
    assert_swapped(second)
    assert len(first.summary["losses"]) == 2
    assert first.summary["losses"] + second.summary["losses"] == whole.summary["losses"]
    assert first.summary["grad_norms"] + second.summary["grad_norms"] == whole.summary["grad_norms"]
    assert_same_checkpoints(whole.directory / "checkpoint", second.directory / "checkpoint")


def test_swapping_may_be_switched_between_runs(trainer: Trainer) -> None:
    """Checkpoints do not depend on swapping."""
    whole = trainer.unswapped("--train-iters 4", saved="torch")
    swap = f"{SWAP_SMALL} --swap-layers all"
    first = trainer.run(f"--train-iters 4 {swap} {recorded('torch')} --exit-interval 2")
    second = trainer.run(f"--train-iters 4 {recorded('torch')} --load {first.directory / 'checkpoint'}")
    assert_same_checkpoints(whole.directory / "checkpoint", second.directory / "checkpoint")
