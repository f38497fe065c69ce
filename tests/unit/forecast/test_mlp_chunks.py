"""The MLP in chunks of the sequence: sites, memory and time by formula, and what it makes possible at long contexts."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron.swap.common.types import GIB, MIB, Action, UsageError
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.kernels import kernels
from megatron.swap.forecast.loss_chunks import choose_num_chunks
from megatron.swap.forecast.mlp_chunks import ATTENTION, MLP, advised_num_chunks, mlp_chunks
from megatron.swap.forecast.shape import layer_class
from megatron.swap.planner.assignment import ends_in_forward, layer_script
from megatron.swap.planner.profile import LayerClass, ModelFigures

H200 = find_gpu("h200")
FOUR = ModelFigures(in_parts=(MLP, ATTENTION), num_parts=4)
TOKENS = 131072
LONG = (
    "--num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --bf16 --micro-batch-size 1 --vocab-size 32000 --hidden-dropout 0 "
    f"--untie-embeddings-and-output-weights --seq-length {TOKENS}"
)
MODEL = read_flags(LONG.split()).model
HIDDEN, FC1, ACTIVATION = (TOKENS * width * 2 / GIB for width in (4096, 2 * 14336, 14336))
"""GiB of the MLP's tensors."""


def chunked(num: int) -> LayerClass:
    return layer_class(replace(MODEL, mlp_chunks=num, mlp_statistics=1), H200, (0,))


def test_chunks_are_those_of_torch() -> None:
    for tokens, num in product((1, 5, 64, 100, 131072), (1, 2, 3, 7, 64, 1000)):
        parts = [len(part) / tokens for part in torch.empty(tokens).chunk(min(num, tokens))]
        found = mlp_chunks(replace(MODEL, seq_length=tokens, mlp_chunks=num))
        assert [chunk.part for chunk in found] == pytest.approx(parts)
        assert [chunk.done for chunk in found] == pytest.approx([sum(parts[i + 1 :]) for i in range(len(parts))])
    of_rank = replace(MODEL, seq_length=20, tensor_parallel=2, sequence_parallel=True, mlp_chunks=4)
    assert [chunk.part for chunk in mlp_chunks(of_rank)] == pytest.approx([0.3, 0.3, 0.3, 0.1]), "its own tokens"
    assert choose_num_chunks(MODEL) < choose_num_chunks(replace(MODEL, mlp_chunks=8)), "the loss is cut as fine"
    for changes, said in (({"mlp_chunks": 1000000}, r"1000000 \(above 32\)"),
                          ({"mlp_chunks": 4, "fp8_recipe": "tensorwise"}, "4 with FP8")):  # fmt: skip
        with pytest.raises(UsageError, match=rf"--mlp-chunks-for-training {said}: cannot be planned without"):
            kernels(replace(MODEL, **changes))


def test_the_chunks_save_together_what_the_whole_saves() -> None:
    whole, parts = chunked(1), chunked(4)
    assert parts.saved_mib == pytest.approx(whole.saved_mib)
    assert [one.site for one in parts.sites if one.site.startswith("mlp.linear_fc1")] == [
        "mlp.linear_fc1/0", *(f"mlp.linear_fc1/{3 * number + 1}" for number in range(4))
    ]  # fmt: skip
    mib = {one.site: one.mib for one in parts.sites}
    assert mib["mlp/3"] * MIB == pytest.approx(FC1 * GIB / 4)
    assert mib["mlp.linear_fc1/0"] * MIB == pytest.approx(HIDDEN * GIB)


def test_backward_holds_one_chunk() -> None:
    """At the last chunk's activation: gradients of the output, of fc1's output and of the activation's."""
    for num in (1, 4):
        entry = chunked(num)
        until_ms = max(one.needed_at_ms for one in entry.sites if one.site.startswith("mlp"))
        peak = max(mib for at_ms, mib in entry.temporaries if at_ms <= until_ms) * MIB / GIB
        of_mlp = HIDDEN + (ACTIVATION + FC1) / num
        if num == 1:
            assert peak == pytest.approx(of_mlp)
        else:  # of the first chunk: the inputs' gradients of the others, and sums of the weights', come on top
            weights = 3 * 4096 * 14336 * 2 / GIB
            assert peak == pytest.approx(of_mlp + 0.75 * HIDDEN + weights)


def test_a_chunk_is_gone_when_the_next_begins() -> None:
    entry = chunked(4)
    ends, saved = ends_in_forward(entry.sites, FOUR), {one.site: one.saved_at_ms for one in entry.sites}
    for number in range(3):
        for site in (f"mlp.linear_fc1/{3 * number + 1}", f"mlp/{number}", f"mlp.linear_fc2/{number}"):
            assert saved[site] < ends[site] == saved[f"mlp.linear_fc1/{3 * number + 4}"]
    assert ends["self_attention.linear_qkv/1"] == saved["mlp.linear_fc1/1"]
    assert not {"mlp.linear_fc1/0", "mlp.linear_fc1/10", "mlp/3", "mlp.linear_fc2/3"} & ends.keys()
    script = layer_script(entry, {"mlp/0": Action.RECOMPUTE}, (), figures=FOUR)
    gone = dict(zip(saved, script.gone, strict=True))
    assert gone["mlp/0"] == ends["mlp/0"]
    assert gone["mlp/3"] == float("inf")
    assert set(layer_script(entry, {}, ()).gone) == {float("inf")}


@pytest.mark.parametrize(
    ("changes", "num"),
    [
        ({}, 8), ({"seq_length": 16384}, 1), ({"seq_length": 8192, "micro_batch_size": 8}, 4),
        ({"ffn_hidden_size": 4096}, 2), ({"num_experts": 8}, 1), ({"mlp_chunks": 8}, 1),
    ],
)  # fmt: skip
def test_how_many_are_advised(changes: dict, num: int) -> None:
    """As many as make a chunk of fc1's output no larger than the hidden states, while chunks fill the GPU."""
    assert advised_num_chunks(replace(MODEL, **changes)) == num
