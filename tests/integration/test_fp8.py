"""Linear layers in 8 bits by the real trainer, on a GPU, beyond ``test_quantized.py``: what needs Megatron's flags."""

import pytest
import torch

from tests.integration.harness import Run, Trainer, assert_same_training, recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RECIPES = {
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
MODEL = (
    "--transformer-impl transformer_engine --bf16 --distributed-backend nccl --swap-deterministic --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --hidden-size 256 "
    "--ffn-hidden-size 512 --seq-length 128 --max-position-embeddings 128 --train-iters 20 --lr-decay-iters 20 "
    "^--no-persist-layer-norm ^--no-bias-swiglu-fusion ^--no-rope-fusion"
)
SMALL = "--swap-min-mib 0.001 --swap-host-gib 0.5 --swap-host-unchecked"
LEAN = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16"


@pytest.fixture(autouse=True)
def _needs_te() -> None:
    pytest.importorskip("transformer_engine.pytorch")


def run(trainer: Trainer, flags: str) -> Run:
    return trainer.run(f"{MODEL} {flags} {recorded('torch')}", env={"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize("recipe", RECIPES)
def test_full_recomputation_with_swapped_inputs(trainer: Trainer, recipe: str) -> None:
    flags = f"{RECIPES[recipe]} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    plain = run(trainer, f"{flags} --swap-layers none")
    swapped = run(trainer, f"{flags} {SMALL} --swap-layers all")
    assert_same_training(plain, swapped)
    assert swapped.summary["swapped_out_bytes"] > 0


@pytest.mark.parametrize("more", ["--fp8-param-gather", LEAN])
@pytest.mark.parametrize("recipe", RECIPES)
def test_optimizer_state_is_offloaded(trainer: Trainer, recipe: str, more: str) -> None:
    flags = f"{RECIPES[recipe]} --use-distributed-optimizer {more}"
    plain = run(trainer, f"{flags} --swap-layers none")
    swapped = run(trainer, f"{flags} {SMALL} --swap-layers all --swap-optimizer 1")
    assert_same_training(plain, swapped)
    assert swapped.summary["optimizer_host_bytes"] > 0
