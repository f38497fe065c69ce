"""Recomputation together with swapping: the tensors that recomputation keeps are swapped, and no bit changes."""

from __future__ import annotations

import pytest

from benchmarks.verify import MOE
from tests.integration.harness import Trainer, assert_swaps_to_the_end
from tests.integration.test_training import MLA

FULL = "--recompute-granularity full --recompute-method"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"


@pytest.mark.supports("--swap-layers all")
@pytest.mark.parametrize(
    ("flags", "num_layers_swapped"),
    [
        pytest.param(f"{FULL} uniform --recompute-num-layers 1", 6, id="uniform-1"),
        pytest.param(
            f"{FULL} uniform --recompute-num-layers 1 {DROPOUT} --bf16", 6, id="uniform-1-dropout-bf16"
        ),
        pytest.param(f"{FULL} uniform --recompute-num-layers 4 --num-layers 16", 2, id="uniform-4"),
        pytest.param(f"{FULL} uniform --recompute-num-layers 1 {MOE}", 6, id="uniform-1-moe"),
    ],
)
def test_inputs_of_recomputed_segments_are_swapped(
    trainer: Trainer, flags: str, num_layers_swapped: int
) -> None:
    _, swapped = trainer.pair(flags, "--swap-layers all --swap-verify --swap-prefetch-gib 0.00001")
    assert_swaps_to_the_end(swapped)
    summary = swapped.summary
    # Sequence 64, micro-batch 2, width 64, two micro-batches: one input a segment, nothing else.
    input_bytes = 64 * 2 * 64 * (2 if "--bf16" in flags else 4)
    layers = [entry for entry in summary["layers"] if entry["swapped_out_bytes"]]
    assert len(layers) >= num_layers_swapped
    for layer in layers:
        assert layer["swapped_out_bytes"] >= 2 * input_bytes


@pytest.mark.supports(f"{FULL} block --recompute-num-layers 4 --swap-layers all")
def test_block_method(trainer: Trainer) -> None:
    """The first layers are recomputed and the others are not. Both are swapped."""
    plain, swapped = trainer.pair(f"{FULL} block --recompute-num-layers 4")
    assert_swaps_to_the_end(swapped)
    assert len(swapped.summary["swapped_layers"]) >= 5
    assert swapped.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"]


# Others need TransformerEngine (layernorm) or grouped matrix products on a GPU (moe_act). The local
# spec's mlp with biases recurses without end upstream: its bias leaves the checkpointed function as it came.
@pytest.mark.supports("--recompute-granularity selective --swap-layers all")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--recompute-modules core_attn", id="core_attn"),
        pytest.param(f"--recompute-modules core_attn {DROPOUT}", id="core_attn-dropout"),
        pytest.param("--recompute-modules mlp --disable-bias-linear", id="mlp"),
        pytest.param(
            "--recompute-modules mlp core_attn --disable-bias-linear --bf16", id="mlp-core_attn-bf16"
        ),
        pytest.param(f"--recompute-modules moe {MOE}", id="moe"),
        pytest.param(
            f"--recompute-modules shared_experts {MOE} --moe-shared-expert-intermediate-size 64", id="shared_experts"
        ),
        pytest.param(f"--recompute-modules mla_up_proj {MLA}", id="mla_up_proj"),
    ],
)
def test_selective(trainer: Trainer, flags: str) -> None:
    plain, swapped = trainer.pair(f"--recompute-granularity selective {flags}")
    assert_swaps_to_the_end(swapped)
    assert swapped.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"]
