"""``--swap-recompute`` through the real trainer: equal to the bit, and the peak falls by what is not held."""

from __future__ import annotations

import pytest

from tests.integration.harness import (
    SWAP_SMALL,
    WITH_FUSION,
    Trainer,
    assert_same_training,
    assert_swaps_to_the_end,
    recorded,
)
from tests.integration.test_training import LLAMA, MLA, MOE

BOTH = "--swap-recompute norm activation"
FUSED_LLAMA = f"{WITH_FUSION} {LLAMA}"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
HIDDEN_BYTES = 64 * 2 * 64 * 4
"""Sequence 64, micro-batch 2, width 64, fp32."""


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("", 1, id="fp32"),
        pytest.param(f"--bf16 {DROPOUT}", 1, id="bf16-dropout"),
        pytest.param(WITH_FUSION, 1, id="fused-gelu"),
        pytest.param(FUSED_LLAMA, 1, id="llama"),
        pytest.param(f"{FUSED_LLAMA} --bf16", 1, id="llama-bf16"),
        pytest.param("--qk-layernorm", 1, id="qk-layernorm"),
        pytest.param(MOE, 1, id="moe"),
        pytest.param(MLA, 1, id="mla"),
        pytest.param("", 2, id="dp2"),
        pytest.param(f"{FUSED_LLAMA} --bf16", 2, id="llama-bf16-dp2"),
        pytest.param("--tensor-model-parallel-size 2", 2, id="tp2"),
        pytest.param("--pipeline-model-parallel-size 2 --global-batch-size 8", 2, id="pp2"),
        pytest.param("--recompute-granularity selective --recompute-modules core_attn", 1, id="core_attn"),
    ],
)
def test_swapped_and_recomputed(trainer: Trainer, flags: str, ranks: int) -> None:
    plain, mixed = trainer.pair(flags, f"--swap-layers all {BOTH} --swap-verify", ranks=ranks)
    assert_swaps_to_the_end(mixed)
    summary = mixed.summary
    assert summary["recomputed_bytes"] > 0
    assert summary["num_recomputed"] > 0
    assert summary["num_late"] == 0
    refused = {line.split(": ", 1)[1] for line in summary["recompute_refused"]}
    # Torch's RMSNorm on a CPU saves another tensor than its bf16 input.
    allowed = {"what it was made from is not saved by anybody: keeping that instead would save nothing"}
    assert refused <= (allowed if "RMSNorm" in flags and "--bf16" in flags else set())
    assert summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"] / 2


@pytest.mark.parametrize(
    ("flags", "kinds", "hidden_units"),
    [
        ("", "norm", 2),
        ("", "activation", 4),
        (WITH_FUSION, "norm activation", 6),
        (FUSED_LLAMA, "activation", 2),  # upstream makes a gated MLP here 2 x 64 wide, instead of 4 x 64
        (FUSED_LLAMA, "norm activation", 4),
    ],
    ids=["norm", "activation", "gelu-both", "swiglu", "swiglu-both"],
)
def test_the_peak_falls_by_what_is_not_held(trainer: Trainer, flags: str, kinds: str, hidden_units: int) -> None:
    """Without any swapping; figures by formula: bytes a layer, eight layers, two micro-batches."""
    plain = trainer.unswapped(flags)
    swap = f"{SWAP_SMALL} --swap-layers none --swap-recompute {kinds}"
    run = trainer.run(f"{flags} {swap} {recorded('torch')}")
    assert_same_training(plain, run)
    one_micro_batch = 8 * hidden_units * HIDDEN_BYTES
    assert run.summary["recomputed_bytes"] == 2 * one_micro_batch
    assert run.summary["swapped_out_bytes"] == 0
    assert run.summary["recompute_refused"] == []
    assert plain.summary["saved_peak_bytes"] - run.summary["saved_peak_bytes"] == one_micro_batch


def test_with_recomputed_blocks(trainer: Trainer) -> None:
    """The first layers recomputed whole, single sites of the others."""
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 4"
    _, run = trainer.pair(flags, f"--swap-layers all {BOTH}")
    assert run.summary["recomputed_bytes"] == 2 * 4 * 6 * HIDDEN_BYTES


def test_a_kind_that_nothing_makes_is_told(trainer: Trainer) -> None:
    run = trainer.run(f"{SWAP_SMALL} --swap-layers none {BOTH} --swap-min-mib 1000")
    assert "--swap-recompute norm does nothing here" in run.output
    assert "--swap-recompute activation does nothing here" in run.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--swap-recompute rotary", ["--swap-recompute rotary", "norm or activation"]),
        (
            f"{BOTH} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            ["--swap-recompute norm activation", "--recompute-method uniform", "Drop --swap-recompute"],
        ),
        (
            f"{BOTH} --recompute-granularity selective --recompute-modules layernorm",
            ["--recompute-modules layernorm", "Drop norm"],
        ),
        (
            f"{BOTH} --recompute-granularity selective --recompute-modules mlp --disable-bias-linear",
            ["--recompute-modules mlp", "Drop activation"],
        ),
        (f"{BOTH} --swiglu", ["--no-bias-swiglu-fusion", "Drop"]),
        (f"{BOTH} --cuda-graph-impl local", ["--cuda-graph-impl local", "drop --swap-recompute"]),
    ],
)
def test_refused_before_the_model_is_built(trainer: Trainer, flags: str, words: list[str]) -> None:
    run = trainer.failing(flags)
    assert "Traceback" not in run.output, run.tail
    assert "number of parameters on" not in run.output, run.tail
    assert [word for word in words if word not in run.error] == [], run.tail
