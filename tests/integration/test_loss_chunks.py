"""``--swap-loss-chunks`` in the real trainer, several chunks: equal from run to run. The matrix has one chunk."""

import re
from pathlib import Path

import pytest

from tests.integration.harness import SAVE, SWAP_SMALL, Trainer, assert_same_checkpoints, assert_same_training
from tests.integration.rows import MASKED

HERE = Path(__file__).parent
FUSING = HERE / "fusing_script.py"
NUM_OUTPUTS = 3 * 2
"""Products with the output layer's weight in backward: steps times micro-batches."""


def test_several_chunks_are_equal_with_and_without_swapping(trainer: Trainer) -> None:
    flags = f"--bf16 --mtp-num-layers 1 {MASKED} {SWAP_SMALL} --swap-loss-chunks"
    swap = "--swap-layers 0-5 --swap-recompute norm"
    runs = [trainer.live(f"{flags} {more}") for more in ("4", f"4 {swap}", "1")]
    assert_same_training(*runs[:2])
    four, swapped, one = (run.summary["saved_peak_bytes"] for run in runs)
    assert swapped < four < one, "the logits of more than one chunk are saved"


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [""], ids=["tied"])
def test_fused_weight_gradients(trainer: Trainer, flags: str) -> None:
    """Each chunk is added to ``main_grad`` once, and the wrapper's hooks see one gradient of the weight."""
    flags += f" ^--no-gradient-accumulation-fusion --bf16 --overlap-grad-reduce {SAVE['torch'].format('checkpoint')}"
    chunked = "--swap-loss-chunks"
    more = ("", f"{chunked} 1", f"{chunked} 4", f"{chunked} 4 {SWAP_SMALL} --swap-layers all")
    runs = [trainer.run(f"{flags} {one}", program=FUSING) for one in more]
    added = [int(re.findall(r"weight gradients added: (\d+)", run.output)[0]) for run in runs]
    assert added == [added[0], added[0], added[0] + 3 * NUM_OUTPUTS, added[0] + 3 * NUM_OUTPUTS]
    for one, other in (runs[:2], runs[2:]):
        assert_same_checkpoints(one.directory / "checkpoint", other.directory / "checkpoint")


@pytest.mark.short
def test_sequence_parallelism(trainer: Trainer) -> None:
    run = trainer.run(ranks=2, program=HERE / "sequence_parallel_script.py")
    assert run.output.count("equal\n") == 2, run.tail
