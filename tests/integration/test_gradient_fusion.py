"""Linear layers that add weight gradients to ``main_grad`` themselves: hooks around them change no bit."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.integration import rows
from tests.integration.harness import SAVE, SWAP_SMALL, Run, Trainer, assert_same_checkpoints, recorded

FUSING = Path(__file__).with_name("fusing_script.py")
TE_FUSING = Path(__file__).with_name("te_fusing_script.py")
DEFAULT = "^--no-gradient-accumulation-fusion"
FUSION = f"{DEFAULT} --bf16 {SAVE['torch'].format('checkpoint')}"
OVERLAP = "--overlap-grad-reduce"
TWICE = "--global-batch-size 8"
NUM_ADDED = 3 * 2 * (8 * 4 + 1)
"""Number of additions: steps, times micro-batches, times linear layers."""
FULL = f"{rows.FULL} uniform"
SWAPS = (
    "--swap-summary summary.json",
    "--swap-layers all",
    "--swap-layers 0-3 --swap-recompute norm activation rotary linear",
)
needs_no_kernel = pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("transformer_engine", "fused_weight_gradient_mlp_cuda"))),
    reason="TransformerEngine or apex is installed",
)


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
    for swap in SWAPS:
        run = trainer.run(f"{FUSION} {flags} {SWAP_SMALL} {swap}", ranks=ranks, program=FUSING)
        assert num_added(run) == {NUM_ADDED}
        assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")


@pytest.mark.supports(f"--bf16 {OVERLAP} {FULL} --swap-layers all")
def test_with_full_recomputation(trainer: Trainer) -> None:
    plain = trainer.run(f"{FUSION} {OVERLAP} {FULL}", program=FUSING)
    run = trainer.run(f"{FUSION} {OVERLAP} {FULL} {SWAP_SMALL} --swap-layers all", program=FUSING)
    assert num_added(plain) == num_added(run) == {NUM_ADDED}
    assert_same_checkpoints(plain.directory / "checkpoint", run.directory / "checkpoint")


# ------------------------------------------------------------------------------ TransformerEngine's kernel


@needs_no_kernel
@pytest.mark.parametrize("full", ["", FULL], ids=["alone", "full-recomputation"])
def test_transformer_engine_stands_in_for_apex(trainer: Trainer, full: str) -> None:
    """Without a flag: the run with apex's kernel has the same arithmetic, so the results are equal to the bit."""
    flags = f"{FUSION} {OVERLAP} {full}"
    apex = trainer.run(flags, program=FUSING)
    for swap in ("", *SWAPS[: 2 if full else None]):
        run = trainer.run(f"{flags} {swap and SWAP_SMALL} {swap}", program=TE_FUSING)
        assert f"weight gradients added: {NUM_ADDED} (torch.float32)" in run.output, run.tail
        assert_same_checkpoints(apex.directory / "checkpoint", run.directory / "checkpoint")


@needs_no_kernel
def test_gradients_of_16_bits(trainer: Trainer) -> None:
    flags = f"{FUSION} --grad-reduce-in-bf16"
    apex = trainer.run(flags, program=FUSING)
    for swap in ("", f"{SWAP_SMALL} --swap-layers all"):
        run = trainer.run(f"{flags} {swap}", program=TE_FUSING)
        assert f"weight gradients added: {NUM_ADDED} (torch.bfloat16)" in run.output, run.tail
        assert_same_checkpoints(apex.directory / "checkpoint", run.directory / "checkpoint")


@needs_no_kernel
@pytest.mark.parametrize(
    ("program", "swap"),
    [("pretrain_gpt_swap.py", ""), ("tests/integration/provider_script.py", "--swap-layers all")],
)
def test_without_a_kernel_the_flag_to_add_is_named(trainer: Trainer, program: str, swap: str) -> None:
    run = trainer.failing(f"{DEFAULT} {swap}", program=Path(__file__).parents[2] / program)
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
