"""Two ranks over gloo: data, tensor, pipeline and expert parallel runs equal those without swapping to the bit."""

from __future__ import annotations

import pytest

from benchmarks.verify import MOE
from tests.integration.harness import Trainer, assert_swaps_to_the_end

PIPELINE = "--pipeline-model-parallel-size 2 --global-batch-size 8"
INTERLEAVED = f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.supports("--swap-layers all", ranks=2)
@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        pytest.param("", "torch", id="dp2"),
        pytest.param("--bf16 --overlap-grad-reduce --global-batch-size 8", "torch", id="dp2-bf16-overlap"),
        pytest.param("--use-distributed-optimizer --bf16", "torch_dist", id="dp2-distributed-optimizer"),
        pytest.param(
            "--use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather", "torch",
            id="dp2-distributed-optimizer-overlap",
        ),
        pytest.param("--tensor-model-parallel-size 2", "torch", id="tp2"),
        pytest.param(
            "--tensor-model-parallel-size 2 --bf16 --attention-dropout 0.1 --hidden-dropout 0.1", "torch",
            id="tp2-dropout",
        ),
        pytest.param("--tensor-model-parallel-size 2 --mlp-chunks-for-training 4", "torch", id="tp2-mlp-chunks"),
        pytest.param(PIPELINE, "torch", id="pp2"),
        pytest.param(f"{PIPELINE} --bf16 --mlp-chunks-for-training 4", "torch", id="pp2-bf16-mlp-chunks"),
        pytest.param(f"{PIPELINE} {FULL}", "torch", id="pp2-full-recompute"),
        pytest.param(f"{PIPELINE} --mtp-num-layers 1", "torch", id="pp2-mtp"),
        pytest.param(INTERLEAVED, "torch", id="pp2-vpp2"),
        pytest.param(f"{INTERLEAVED} --bf16 --eval-interval 2 --eval-iters 1", "torch", id="pp2-vpp2-eval"),
        pytest.param(f"{MOE} --expert-model-parallel-size 2", "torch", id="ep2"),
    ],
)  # fmt: skip
def test_equal_to_the_bit(trainer: Trainer, flags: str, saved: str) -> None:
    plain, swapped = trainer.pair(flags, "--swap-layers all --swap-verify", ranks=2, saved=saved)
    assert_swaps_to_the_end(swapped)
    assert swapped.summary["num_ranks"] == 2
    assert len(swapped.summary["ranks"]) == 2
    assert swapped.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"]
    assert swapped.summary["num_late"] == 0


def test_by_torchrun(trainer: Trainer) -> None:
    """torchrun starts fresh processes, as for users."""
    trainer.pair("", ranks=2, fresh=True)
