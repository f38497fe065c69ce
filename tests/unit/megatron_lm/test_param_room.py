"""Parameters that the device cannot hold twice wait in host memory until Megatron copies them into its buffer."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron.swap.megatron_lm import param_room
from megatron.swap.patches.cpu import CPU_PATCHES
from megatron.swap.patches.param_buffer import param_buffer_patch
from megatron.swap.patches.registry import apply

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NUM_LAYERS = 4


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def model_of(width: int, device: str) -> nn.Module:
    torch.manual_seed(1)
    linear = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*linear)


def wrapped(model: nn.Module, is_distributed: bool = True) -> DistributedDataParallel:
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=False, use_distributed_optimizer=is_distributed, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, settings, model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="patches for machines without CUDA")
@pytest.mark.parametrize("is_distributed", [True, False])
def test_parameters_may_be_elsewhere_when_megatron_copies_them(is_distributed: bool) -> None:
    model = model_of(64, "cpu")
    expected = [param.detach().clone() for param in model.parameters()]
    calls: list[tuple[list[nn.Parameter], int]] = []

    def move(params: Sequence[nn.Parameter], num_bytes: int) -> None:
        calls.append((list(params), num_bytes))
        for param in params:
            param.data = param.data.clone()

    with apply(CPU_PATCHES), apply([param_buffer_patch(move)]):
        parallel = wrapped(model, is_distributed)
    if is_distributed:
        ((params, num_bytes),) = calls
        assert [id(param) for param in params] == [id(param) for param in model.parameters()]
        (buffer,) = parallel.buffers
        assert num_bytes <= buffer.param_data.nbytes + buffer.grad_data.nbytes < 1.1 * num_bytes
    else:
        assert not calls, "Megatron makes no buffer for parameters"
    assert all(torch.equal(param, values) for param, values in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("room", "available", "has_moved"),
    [([True], 10**6, False), ([False, True], 10**6, False), ([False, False], 1200, True),
     ([False, False], 1199, False)],
)  # fmt: skip
def test_parameters_move_where_the_device_has_no_room_and_the_host_has(
    monkeypatch: pytest.MonkeyPatch, room: list[bool], available: int, has_moved: bool
) -> None:
    asked: list[int] = []

    def has_room(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return room[len(asked) - 1]

    monkeypatch.setattr(param_room, "has_room", has_room)
    monkeypatch.setattr(param_room, "available_host_bytes", lambda: available)
    monkeypatch.setattr(param_room, "local_world_size", lambda: 2)
    values = types.SimpleNamespace(cpu=lambda: "in host memory")
    params = [types.SimpleNamespace(numel=lambda: 100, element_size=lambda: 2, data=values) for _ in range(3)]
    param_room.make_room(params, 77)  # type: ignore[arg-type]
    assert asked == [77] * len(room)
    assert all((param.data == "in host memory") == has_moved for param in params)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_model_that_fits_once_is_built(device: str) -> None:
    torch.cuda.empty_cache()
    width = 8192
    param_bytes = NUM_LAYERS * width * width * 2
    total_bytes = torch.cuda.mem_get_info()[1]
    held_bytes = torch.cuda.memory_reserved()

    def build(make_room: Callable[[Sequence[nn.Parameter], int], None]) -> None:
        model = model_of(width, device)
        expected = [param.detach().cpu() for param in model.parameters()]
        with apply([param_buffer_patch(make_room)]):
            parallel = wrapped(model)
        assert all(
            param.is_cuda and torch.equal(param.cpu(), values)
            for param, values in zip(model.parameters(), expected, strict=True)
        )
        del parallel

    try:
        torch.cuda.set_per_process_memory_fraction((held_bytes + 2.5 * param_bytes) / total_bytes)
        with pytest.raises(torch.OutOfMemoryError):
            build(lambda params, num_bytes: None)
        torch.cuda.empty_cache()
        build(param_room.make_room)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
