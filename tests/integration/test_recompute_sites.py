"""``--swap-recompute`` through the real trainer: equal to the bit, and the peak falls by the recomputed bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.harness import (
    PROGRAM,
    SWAP_SMALL,
    WITH_FUSION,
    Trainer,
    assert_same_training,
    assert_swaps_to_the_end,
    recorded,
)
from tests.integration.test_training import LLAMA, MLA, MOE

BOTH = "--swap-recompute norm activation"
ALL_KINDS = "--swap-recompute norm activation rotary linear"
NO_BIAS = f"{WITH_FUSION} --disable-bias-linear --swiglu"
"""Flags without biases. Then, or with fused biases, the activation saves the output of linear_fc1 itself."""
FUSED_LLAMA = f"{WITH_FUSION} {LLAMA}"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
RMS_NORM_ON_CPU = {"one of its inputs is not saved, and keeping that input instead would save no memory"}
"""Reason: on the CPU, torch's RMS norm saves another tensor than its bf16 input."""
HIDDEN_BYTES = 64 * 2 * 64 * 4
"""Bytes of hidden states: sequence 64, micro-batch 2, width 64, fp32."""
ANGLES_BYTES = 64 * 16 * 4
"""Bytes of the rotary angles: sequence 64, 16 channels a head, fp32."""


@pytest.mark.supports(f"--swap-layers all {BOTH}")
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
        pytest.param(f"{FUSED_LLAMA} --mlp-chunks-for-training 3", 1, id="mlp-chunks"),
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
    assert refused <= (RMS_NORM_ON_CPU if "RMSNorm" in flags and "--bf16" in flags else set())
    assert summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"] / 2


@pytest.mark.parametrize(
    ("flags", "kinds", "hidden_units"),
    [
        ("", "norm", 2),
        ("", "activation", 4),
        (WITH_FUSION, "norm activation", 6),
        (FUSED_LLAMA, "activation", 2),  # upstream makes a gated MLP here 2 x 64 wide, instead of 4 x 64
        (FUSED_LLAMA, "norm activation", 4),
        ("", "residual", 1),
        (f"{FUSED_LLAMA} ^--no-bias-dropout-fusion", "residual", 1),
        ("", "rotary", 2),  # queries and keys; linear_qkv's output is there for the values
        ("", "linear", 3),  # with biases the activation saves a sum that no linear layer made
        (NO_BIAS, "linear", 3 + 4),
        (NO_BIAS, "rotary linear", 2 + 3 + 4),
        (NO_BIAS, "norm activation rotary residual linear", 2 + 2 + 2 + 1 + 3 + 4),
        (FUSED_LLAMA, "rotary linear", 1 + 0.5 + 2 + 4),  # two heads of queries share one of keys and values
    ],
    ids=["norm", "activation", "gelu-both", "swiglu", "swiglu-both", "residual", "fused-residual", "rotary", "linear",
         "linear-fc1", "both", "all", "grouped"],
)
def test_the_peak_falls_by_what_is_not_held(trainer: Trainer, flags: str, kinds: str, hidden_units: int) -> None:
    """Nothing is swapped. The figures follow by formula: bytes a layer, eight layers, two micro-batches."""
    plain = trainer.unswapped(flags)
    swap = f"{SWAP_SMALL} --swap-layers none --swap-recompute {kinds}"
    run = trainer.run(f"{flags} {swap} {recorded('torch')}")
    assert_same_training(plain, run)
    one_micro_batch = 8 * hidden_units * HIDDEN_BYTES
    assert run.summary["recomputed_bytes"] == 2 * one_micro_batch
    assert run.summary["swapped_out_bytes"] == 0
    assert run.summary["recompute_refused"] == []
    spared = plain.summary["saved_peak_bytes"] - run.summary["saved_peak_bytes"]
    if "rotary" in kinds:
        spared += ANGLES_BYTES  # kept for all layers
    if {"rotary", "linear"} <= {*kinds.split()}:
        # Where so little is held, the peak is in backward, beside what is made again there.
        assert one_micro_batch - (2 if "residual" in kinds else 1) * HIDDEN_BYTES <= spared <= one_micro_batch
    else:
        assert spared == one_micro_batch


@pytest.mark.supports(f"--swap-layers 0-3 {ALL_KINDS}")
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param("", 1, id="fp32"),
        pytest.param(f"--bf16 {DROPOUT} {WITH_FUSION}", 1, id="bf16-dropout-fused"),
        pytest.param(FUSED_LLAMA, 1, id="llama"),
        pytest.param(f"{FUSED_LLAMA} --bf16", 1, id="llama-bf16"),
        pytest.param(f"{NO_BIAS} --rotary-percent 0.5 --rotary-interleaved", 1, id="half-rotary"),
        pytest.param("--qk-layernorm", 1, id="qk-layernorm"),
        pytest.param(MOE, 1, id="moe"),
        pytest.param(MLA, 1, id="mla"),
        pytest.param(f"{NO_BIAS} --tensor-model-parallel-size 2", 2, id="tp2"),
        pytest.param(f"{NO_BIAS} --pipeline-model-parallel-size 2 --global-batch-size 8", 2, id="pp2"),
        pytest.param("--recompute-granularity selective --recompute-modules core_attn", 1, id="core_attn"),
    ],
)
def test_all_kinds(trainer: Trainer, flags: str, ranks: int) -> None:
    kinds = ALL_KINDS if DROPOUT in flags or "--tensor" in flags else f"{ALL_KINDS} residual"
    _, mixed = trainer.pair(flags, f"--swap-layers 0-3 {kinds} --swap-verify", ranks=ranks)
    assert mixed.summary["recomputed_bytes"] > 0
    assert mixed.summary["num_late"] == 0
    refused = {line.split(": ", 1)[1] for line in mixed.summary["recompute_refused"]}
    assert refused <= (RMS_NORM_ON_CPU if "--bf16" in flags and "RMSNorm" in flags else set())


@pytest.mark.supports(f"--recompute-granularity full --recompute-method block --swap-layers all {BOTH}")
def test_with_recomputed_blocks(trainer: Trainer) -> None:
    """The first layers are recomputed whole, single sites in the others."""
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
        ("--swap-recompute dropout",
         ["--swap-recompute dropout", "norm or activation or rotary or quantized or residual or linear"]),
        (
            f"{ALL_KINDS} --recompute-granularity selective --recompute-modules mlp --disable-bias-linear",
            ["--recompute-modules mlp", "Drop activation"],
        ),
        (
            "--swap-recompute linear --recompute-granularity selective --recompute-modules mlp --disable-bias-linear",
            ["--recompute-modules mlp", "Drop linear"],
        ),
        (
            "--swap-recompute linear --recompute-granularity selective --recompute-modules layernorm",
            ["--recompute-modules layernorm", "Drop linear"],
        ),
        ("--swap-recompute residual --hidden-dropout 0.1", ["needs --hidden-dropout 0; 0.1 is set", "drop residual"]),
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


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        pytest.param(f"--bf16 {DROPOUT}", 1, id="bf16-dropout"),
        pytest.param(FUSED_LLAMA, 1, id="llama"),
        pytest.param(MOE, 1, id="moe"),
        pytest.param(f"--pipeline-model-parallel-size 2 --global-batch-size 8 {DROPOUT}", 2, id="pp2"),
        pytest.param(f"--tensor-model-parallel-size 2 {DROPOUT}", 2, id="tp2"),
    ],
)
def test_whole_layers(trainer: Trainer, tmp_path: Path, flags: str, ranks: int) -> None:
    """Only a plan recomputes whole layers. Here a policy does it for every second layer, swapped or not."""
    program = tmp_path / "program.py"
    program.write_text(
        "import runpy\n"
        "from megatron.swap.engine.policy import ManualPolicy\n"
        "ManualPolicy.recomputes_whole = lambda self, layer: layer % 2 == 1\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    plain = trainer.unswapped(flags, ranks=ranks)
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-layers 0-5 --swap-recompute norm --swap-verify {recorded('torch')}",
                      program=program, ranks=ranks)  # fmt: skip
    assert_same_training(plain, run)
    assert run.summary["recomputed_bytes"] > 0
    assert run.summary["saved_peak_bytes"] < plain.summary["saved_peak_bytes"] / 2
