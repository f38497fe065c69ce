"""Parameters that the device cannot hold twice wait in host memory until Megatron has made its buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron.swap.megatron_lm import accumulators, param_copies
from megatron.swap.megatron_lm.accumulators import hold_grad_accumulators
from megatron.swap.patches.cpu import CPU_PATCHES
from megatron.swap.patches.param_buffer import param_buffer_patch
from megatron.swap.patches.registry import apply

NUM_LAYERS = 4
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="patches for machines without CUDA")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


class Other(nn.Parameter):
    """A parameter of another type, as those in 8 bits are."""


def model_of(width: int, device: str) -> nn.Module:
    torch.manual_seed(1)
    linear = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device=device) for _ in range(NUM_LAYERS)]
    return nn.Sequential(*linear)


def wrapped(model: nn.Module, *, is_distributed: bool = True, in_fp32: bool = False) -> DistributedDataParallel:
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32, use_distributed_optimizer=is_distributed, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, settings, model)


@on_cpu
@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("is_distributed", [True, False])
def test_the_buffers_bytes_are_known_before_they_are_made(is_distributed: bool, in_fp32: bool) -> None:
    model = model_of(64, "cpu")
    model[0].weight = Other(model[0].weight.data)
    calls: list[tuple[list[nn.Parameter], int]] = []

    def note(params: Sequence[nn.Parameter], num_bytes: int) -> AbstractContextManager[None]:
        calls.append((list(params), num_bytes))
        return nullcontext()

    with apply(CPU_PATCHES), apply([param_buffer_patch(note)]):
        parallel = wrapped(model, is_distributed=is_distributed, in_fp32=in_fp32)
    if is_distributed:
        ((params, num_bytes),) = calls
        assert [id(param) for param in params] == [id(param) for param in list(model.parameters())[1:]]
        (buffer,) = parallel.buffers
        assert num_bytes == buffer.param_data.nbytes + buffer.grad_data.nbytes
    else:
        assert not calls, "Megatron makes no buffer for parameters"


@on_cpu
@pytest.mark.parametrize(
    ("free", "host_bytes", "is_moved"),
    [([True, True], 10**6, False), ([False, True], 10**6, False), ([False, False], NUM_LAYERS * 64 * 64 * 2, True),
     ([False, False], NUM_LAYERS * 64 * 64 * 2 - 1, False)],
)  # fmt: skip
def test_parameters_keep_values_and_accumulators(
    monkeypatch: pytest.MonkeyPatch, free: list[bool], host_bytes: int, is_moved: bool
) -> None:
    """They wait in host memory where the device lacks room and the host has it."""
    answers = iter(free)
    monkeypatch.setattr(param_copies, "has_free", lambda num_bytes: next(answers))
    model = model_of(64, "cpu")
    expected = [param.detach().clone() for param in model.parameters()]
    held = hold_grad_accumulators(model)
    seen: list[int] = []

    @contextmanager
    def watched(params: Sequence[nn.Parameter], num_bytes: int) -> Iterator[None]:
        with param_copies.off_device(params, num_bytes, host_bytes=host_bytes):
            seen.extend(param.untyped_storage().nbytes() for param in params)
            yield

    with apply(CPU_PATCHES), apply([param_buffer_patch(watched)]):
        parallel = wrapped(model)
    assert seen == [2 if is_moved else 64 * 64 * 2] * NUM_LAYERS
    params = list(model.parameters())
    assert all(torch.equal(param, values) for param, values in zip(params, expected, strict=True))
    (buffer,) = parallel.buffers
    storage = buffer.param_data.untyped_storage().data_ptr()
    assert all(param.untyped_storage().data_ptr() == storage and param.is_contiguous() for param in params)
    assert set(parallel.grad_accs) == set(held), "gradients would be added on another stream"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_that_fits_once_is_built() -> None:
    torch.cuda.empty_cache()
    width = 8192
    param_bytes = NUM_LAYERS * width * width * 2
    total_bytes = torch.cuda.mem_get_info()[1]
    held_bytes = torch.cuda.memory_reserved()

    def build(apart: Callable[[Sequence[nn.Parameter], int], AbstractContextManager[None]]) -> None:
        model = model_of(width, "cuda")
        expected = [param.detach().cpu() for param in model.parameters()]
        held = hold_grad_accumulators(model)
        with apply([param_buffer_patch(apart)]):
            parallel = wrapped(model)
        assert all(
            param.is_cuda and torch.equal(param.cpu(), values)
            for param, values in zip(model.parameters(), expected, strict=True)
        )
        assert set(parallel.grad_accs) == set(held)

    try:
        torch.cuda.set_per_process_memory_fraction((held_bytes + 2.5 * param_bytes) / total_bytes)
        with pytest.raises(torch.OutOfMemoryError):
            build(lambda params, num_bytes: nullcontext())
        torch.cuda.empty_cache()
        build(functools.partial(param_copies.off_device, host_bytes=2 * param_bytes))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def node_of(parameter: nn.Parameter) -> object:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def test_who_asks_later_gets_the_same_node() -> None:
    module = nn.Linear(2, 3)
    nodes = accumulators.hold_grad_accumulators(module)
    assert [node_of(parameter) for parameter in module.parameters()] == nodes
    assert [node.variable for node in nodes] == list(module.parameters())


def test_frozen_and_shared_parameters() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    second.weight = first.weight
    second.bias.requires_grad_(False)
    assert len(accumulators.hold_grad_accumulators(nn.ModuleList([first, second]))) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_memory_of_gradients_is_free_at_once() -> None:
    """Megatron puts hooks on the nodes on another stream. Memory that passes between streams is freed late."""

    def num_late(early: bool) -> int:
        module = nn.Linear(1024, 1024, bias=False, device="cuda")
        nodes = accumulators.hold_grad_accumulators(module) if early else []
        with torch.cuda.stream(torch.cuda.Stream()):
            nodes.append(node_of(module.weight))
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        module(torch.ones(8, 1024, device="cuda")).sum().backward()
        module.weight.grad = None
        stats = torch.cuda.memory_stats()
        late: int = stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
        torch.cuda.synchronize()
        return late

    assert num_late(early=False) > 0
    assert num_late(early=True) == 0
