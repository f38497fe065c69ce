"""Linear layers that add weight gradients to ``main_grad`` themselves: hooks around them change no bit."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.integration.harness import SAVE, SWAP_SMALL, Trainer, assert_same_checkpoints, recorded
from tests.integration.rows import FUSED_SWAPS, WITH_HOOKS

FUSING = Path(__file__).with_name("fusing_script.py")
DEFAULT = "^--no-gradient-accumulation-fusion"
FUSION = f"{DEFAULT} --bf16 {SAVE['torch'].format('checkpoint')}"
NUM_ADDED = 3 * 2 * (8 * 4 + 1)
"""Number of additions: steps, times micro-batches, times linear layers."""


def assert_added_alike(trainer: Trainer, flags: str, swaps: Sequence[str], ranks: int = 1) -> None:
    """Check that each way to swap adds as many gradients as none, and changes no bit."""
    plain, *swapped = (
        trainer.run(f"{flags} {swap and SWAP_SMALL} {swap}", ranks=ranks, program=FUSING) for swap in ("", *swaps)
    )
    for run in (plain, *swapped):
        assert set(re.findall(r"weight gradients added: (\d+)", run.output)) == {f"{NUM_ADDED}"}
        assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")


@pytest.mark.parametrize(("flags", "ranks"), [pytest.param(*WITH_HOOKS[0], marks=pytest.mark.nightly), *WITH_HOOKS[1:]])
def test_equal_to_a_run_without_hooks(trainer: Trainer, flags: str, ranks: int) -> None:
    assert_added_alike(trainer, f"{FUSION} {flags}", FUSED_SWAPS, ranks)


@pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("transformer_engine", "fused_weight_gradient_mlp_cuda"))),
    reason="TransformerEngine or apex is installed",
)
def test_without_a_kernel_the_flag_to_add_is_named(trainer: Trainer) -> None:
    run = trainer.failing(DEFAULT)
    assert "Traceback" not in run.output, run.tail
    assert run.error.startswith("--gradient-accumulation-fusion (Megatron's default) needs TransformerEngine or apex")
    assert "Add --no-gradient-accumulation-fusion" in run.error
    assert "\n" not in run.error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
def test_equal_on_a_gpu(trainer: Trainer, spec: str) -> None:
    """Megatron's default, with TransformerEngine's kernel: for the output layer, or with *local* for all layers."""
    pytest.importorskip("transformer_engine.pytorch")
    flags = f"{DEFAULT} --bf16 --distributed-backend nccl --swap-deterministic --transformer-impl {spec}"
    flags += f" {recorded('torch')} --swap-min-mib 0.001 --swap-host-gib 0.5"
    runs = [
        trainer.run(f"{flags} --swap-layers {layers}", env={"CUDA_VISIBLE_DEVICES": "0"}) for layers in ("none", "all")
    ]
    assert runs[0].summary["losses"] == runs[1].summary["losses"]
    assert_same_checkpoints(*(run.directory / "checkpoint" for run in runs))
