"""The memory around a loss in chunks, the number that ``auto`` takes, and what ``megatron-swap plan`` says of them."""

import re
from dataclasses import replace

import pytest

from megatron.swap.cli import plan as program
from megatron.swap.common.types import GIB, MIB
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.loss_chunks import choose_num_chunks, loss_bytes, saved_bytes
from megatron.swap.forecast.shape import shape_profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan

FLAGS = (
    "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --bf16 --seq-length 8192 --micro-batch-size 1 --vocab-size 128256 "
    "--hidden-dropout 0 --max-position-embeddings 131072"
)
MODEL = read_flags(FLAGS.split()).model
LONG = replace(MODEL, seq_length=131072)
LOGITS_MIB = 2 * 8192 * 128256 / MIB


@pytest.mark.parametrize(("num_chunks", "rows"), [(8, 1024), (5, 1638.4)])
def test_bytes_of_chunks(num_chunks: int, rows: float) -> None:
    sizes = loss_bytes(MODEL, num_chunks)
    assert sizes.logits / MIB == pytest.approx(LOGITS_MIB / num_chunks)
    assert sizes.rows == pytest.approx(4 * 128256 * rows)
    assert sizes.gradients == 2 * 8192 * 4096


def test_ranks_share_words_tokens_and_sequence() -> None:
    whole, split = loss_bytes(MODEL, 4), loss_bytes(replace(MODEL, tensor_parallel=2, context_parallel=2), 4)
    assert (split.logits, split.gradients) == (whole.logits / 4, whole.gradients / 2)
    assert loss_bytes(replace(MODEL, tensor_parallel=2, sequence_parallel=True)).inputs == whole.inputs / 2


@pytest.mark.parametrize("model", [MODEL, LONG])
def test_auto_takes_the_fewest_that_suffice(model: object) -> None:
    assert isinstance(model, type(MODEL))
    num = choose_num_chunks(model)
    of_layer = model.seq_length * 2 * (2 * 4096 + 2 * 14336)

    def beside(num_chunks: int) -> float:
        sizes = loss_bytes(model, num_chunks)
        return sizes.peak - sizes.inputs

    assert 1 < num < 16
    assert beside(num) <= of_layer < beside(num - 1)
    assert saved_bytes(model) == loss_bytes(model).peak - loss_bytes(model, num).peak > 0


def test_a_sum_of_the_weights_gradients_is_counted_unless_megatrons_own_takes_it() -> None:
    """Several chunks sum in fp32. Without fusion, or beside gradients in 16 bits, that is a buffer of their own."""
    for more, has_sum in (
        ("", False), ("--no-gradient-accumulation-fusion", True), ("--grad-reduce-in-bf16", True),
        ("--use-precision-aware-optimizer --main-grads-dtype bf16", True),
    ):  # fmt: skip
        assert read_flags(f"{FLAGS} {more}".split()).has_sum_in_loss == has_sum
    assert loss_bytes(MODEL, 1, has_sum=True) == loss_bytes(MODEL)
    short = replace(MODEL, seq_length=4096)
    assert choose_num_chunks(short) > 1
    assert choose_num_chunks(short, has_sum=True) == 1, "chunks would take more than the whole"
    gpu = find_gpu("h200")
    profiles = [shape_profile(MODEL, gpu, 4, loss_chunks=8, has_sum_in_loss=given) for given in (False, True)]
    assert profiles[1].non_layer.peak_gib > profiles[0].non_layer.peak_gib + 1.5


def test_the_profile_has_the_lower_peak_and_the_second_product() -> None:
    gpu = find_gpu("h200")
    whole, eight = (shape_profile(MODEL, gpu, 4, loss_chunks=num) for num in (1, 8))
    assert eight.non_layer.kept_gib == loss_bytes(MODEL, 8).kept / GIB
    assert eight.non_layer.peak_gib == loss_bytes(MODEL, 8).peak / GIB
    assert whole.non_layer.forward_ms == eight.non_layer.forward_ms
    more_ms = eight.non_layer.backward_ms - whole.non_layer.backward_ms
    product_ms = 2 * 8192 * 128256 * 4096 / (gpu.for_width(4096).tflops * 1e9)
    assert more_ms == pytest.approx(7 / 8 * product_ms)
    peaks = [simulate(profile, empty_plan(profile)).peak_gib for profile in (whole, eight)]
    assert peaks[0] - peaks[1] >= 0.8 * LOGITS_MIB * MIB / GIB
    two = replace(MODEL, pipeline_parallel=2)
    first, other = (shape_profile(two, gpu, 4, loss_chunks=num) for num in (1, 8))
    assert first == other, "the first stage has no loss"


@pytest.mark.slow
def test_plan_predicts_the_flag_and_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The unswapped peak falls, and without the flag a note says what it would save."""
    found = {}
    for flag in ("", " --swap-loss-chunks 8", " --swap-loss-chunks auto"):
        assert program.main(f"--gpu h200 --memory-gib 29 -- {FLAGS}{flag}".split()) == 0
        text = capsys.readouterr().out
        found[flag] = float(re.findall(r"^nothing +([\d.]+)", text, re.MULTILINE)[0])
        assert (flag in text.replace("\\\n   ", "")) or not flag
        assert ("computes the logits twice" in text) == (not flag), text
    whole, eight, auto = found.values()
    assert whole - eight >= 0.8 * LOGITS_MIB * MIB / GIB
    assert abs(eight - auto) < 0.5
