"""Save and resume: the result equals one run without swapping."""

import pytest

from tests.integration.harness import SWAP_SMALL, Trainer, assert_same_checkpoints, assert_swapped, recorded


@pytest.mark.parametrize(
    ("flags", "saved", "swaps_on"),
    [
        pytest.param(
            "--attention-dropout 0.1 --hidden-dropout 0.1", "torch", True, id="dropout", marks=pytest.mark.short
        ),
        pytest.param("--bf16", "torch_dist", False, id="bf16-torch_dist", marks=pytest.mark.nightly),
    ],
)
def test_resumed(trainer: Trainer, flags: str, saved: str, swaps_on: bool) -> None:
    """Checkpoints do not depend on swapping: the second run swaps, or not."""
    flags = f"--train-iters 4 {flags}"
    whole = trainer.unswapped(flags, saved=saved)
    swap = f"{SWAP_SMALL} --swap-layers all"
    first = trainer.run(f"{flags} {swap} {recorded(saved)} --exit-interval 2")
    more = swap if swaps_on else ""
    second = trainer.run(f"{flags} {more} {recorded(saved)} --load {first.directory / 'checkpoint'}")
    assert_swapped(first)
    for name in ("losses", "grad_norms"):
        assert len(first.summary[name]) == 2
        assert first.summary[name] + second.summary[name] == whole.summary[name]
    assert_same_checkpoints(whole.directory / "checkpoint", second.directory / "checkpoint")
