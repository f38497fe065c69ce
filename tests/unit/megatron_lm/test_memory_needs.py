"""A run that certainly does not fit is refused before the model is built; one that fits never is."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, MIB
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm import memory_needs as module
from megatron.swap.megatron_lm.memory_needs import (
    MemoryNeeds,
    OutOfMemoryAhead,
    check_device,
    check_host,
    check_memory,
    memory_needs,
    needs_line,
)
from megatron.swap.memory.host_memory import HostCapacity
from tests.megatron_args import NAMES, OF_A_RUN

LAYERS, WIDTH, TOKENS, VOCABULARY = 24, 1024, 8 * 2048, 50304
PARAMS = LAYERS * (12 * WIDTH**2 + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
ALL = Settings(layers="all")


def facts(**changes: Any) -> MegatronFacts:
    """The flags of MODEL=350m on a machine without a GPU."""
    of_350m = {
        "num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": 4 * WIDTH, "num_attention_heads": 16,
        "kv_channels": 64, "seq_length": 2048, "micro_batch_size": 8, "padded_vocab_size": VOCABULARY,
        "vocab_size": 50257, "num_query_groups": None, "accumulate_allreduce_grads_in_fp32": False,
        "recompute_num_layers": None,
    }  # fmt: skip
    return MegatronFacts.of(NAMES | OF_A_RUN | of_350m | changes)


def capacity(available_gib: float, ranks: int = 1) -> HostCapacity:
    return HostCapacity(24 * GIB, int(available_gib * GIB), None, 0, "", local_world_size=ranks)


def test_the_figures_of_350m() -> None:
    """In single precision 16 bytes a parameter, and 16 tensors as wide as the hidden state a layer; on a GPU in bf16
    18 bytes. Swapped activations leave the GPU, offloaded state too."""
    needs = memory_needs(facts(), ALL, on_gpu=False)
    assert (needs.model_bytes, needs.activation_bytes) == (16 * PARAMS, LAYERS * 16 * TOKENS * WIDTH * 4)
    args = facts(bf16=True, accumulate_allreduce_grads_in_fp32=True)
    assert memory_needs(args, ALL, on_gpu=True) == MemoryNeeds(18 * PARAMS)
    assert memory_needs(args, replace(ALL, optimizer=1.0), on_gpu=True) == MemoryNeeds(6 * PARAMS)
    assert memory_needs(args, replace(ALL, optimizer=1.0), on_gpu=False).model_bytes == 18 * PARAMS


@pytest.mark.parametrize(
    ("changes", "num_bytes"),
    [
        ({"tensor_model_parallel_size": 2}, 16 * PARAMS // 2),
        ({"padded_vocab_size": None, "vocab_size": None}, 16 * (PARAMS - 2 * (VOCABULARY - 1) * WIDTH)),
        ({"pipeline_model_parallel_size": 2}, 16 * (LAYERS // 2) * (12 * WIDTH**2 + 2 * WIDTH)),
        ({"use_distributed_optimizer": True, "data_parallel_size": 4}, (4 + 4 + 8 // 4) * PARAMS),
        ({"bf16": True}, (2 + 2 + 12) * PARAMS),
        ({"bf16": True, "use_precision_aware_optimizer": True}, (2 + 2) * PARAMS),
        *[({name: True}, 0) for name in ("num_experts", "fp8")],
    ],
)
def test_the_model_of_a_rank_is_a_lower_bound(changes: dict[str, Any], num_bytes: int):
    assert memory_needs(facts(**changes), ALL, on_gpu=True).model_bytes == num_bytes


@pytest.mark.parametrize(
    ("changes", "config", "widths"),
    [
        ({}, Settings(), 16),  # unswapped: it is the same memory
        ({"recompute_granularity": "full", "recompute_method": "block"}, ALL, 1),
        ({}, replace(ALL, recompute=("norm", "activation")), 16 - 2 - 4),
        ({"variable_seq_lengths": True}, ALL, 0),
        ({}, replace(ALL, disk_dir="/tmp"), 0),
    ],
)
def test_activations_without_a_gpu(changes: dict[str, Any], config: Settings, widths: int):
    needs = memory_needs(facts(**changes), config, on_gpu=False)
    assert needs.activation_bytes == LAYERS * widths * TOKENS * WIDTH * 4


def test_too_much_for_the_host():
    needs = memory_needs(facts(), ALL, on_gpu=False)
    with pytest.raises(OutOfMemoryAhead) as caught:
        check_host(needs, capacity(21.6), facts())
    for words in ("at least 30.04 GiB", "24.00 GiB for the activations", "21.60 GiB are available",
                  "--micro-batch-size"):  # fmt: skip
        assert words in str(caught.value)
    check_host(needs, capacity(30.1), facts())
    with pytest.raises(OutOfMemoryAhead, match="on each of 2 ranks"):
        check_host(needs, capacity(60, ranks=2), facts())


def test_too_much_for_the_gpu_and_the_line() -> None:
    check_device(MemoryNeeds(GIB), GIB)
    with pytest.raises(OutOfMemoryAhead, match=r"at least 80.00 GiB on each rank, and the GPU has 79.00 GiB. Offl"):
        check_device(MemoryNeeds(80 * GIB), 79 * GIB)
    assert needs_line(MemoryNeeds(GIB, 2 * GIB), 7 * GIB, 2) == (
        "at least 1.00 GiB for model and optimizer, 2.00 GiB for activations, on each of 2 ranks; there are 7.00 GiB: "
        "this may not suffice"
    )
    assert needs_line(MemoryNeeds(0, 2 * GIB), 16 * GIB) is None


def test_host_memory_for_swapping_leaves_room_for_the_model(monkeypatch: pytest.MonkeyPatch):
    """The emulated device and the host are one memory."""
    host = HostCapacity(64 * GIB, 60 * GIB, None, 54 * GIB, "64 GiB", 6 * GIB)
    monkeypatch.setattr(module, "safe_host_bytes", lambda ranks: host)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    left = check_memory(facts(), ALL).capacity
    assert left is not None
    assert 0 <= 54 * GIB - 16 * PARAMS - left.safe_bytes < MIB
    assert left.available_bytes == 60 * GIB - 16 * PARAMS
    huge = facts(num_layers=240)
    with pytest.raises(OutOfMemoryAhead):
        check_memory(huge, ALL)
    check_memory(huge, replace(ALL, host_unchecked=True))
