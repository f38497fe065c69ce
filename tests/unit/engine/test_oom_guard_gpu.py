"""The out-of-memory guard on a CUDA device, with a limit on this process's memory."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.types import GIB, MIB
from megatron.swap.devices.cuda import FREE_ALONE_BYTES, CudaDevice
from tests.engine import Engine, Result, batch, forward, loss_of, stack
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = [
    NEEDS_COMPILER, pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]  # fmt: skip

TOKENS = 2048
"""Tokens of a micro-batch. Attention's scores are then 32 MiB a layer, so saved tensors far exceed the allocator's
rounding."""


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def step(layers: nn.ModuleList) -> Result:
    """Run a step with two micro-batches in flight."""
    layers.zero_grad()
    losses = [loss_of(forward(layers, batch(number, tokens=TOKENS).cuda())) for number in range(2)]
    done = [loss.detach() for loss in losses]
    while losses:
        losses.pop(0).backward()
    return Result(done, [parameter.grad for parameter in layers.parameters()])


def in_use() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of ``run`` beyond the bytes before it."""
    before = in_use()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def limited(run: Callable[[], Any], num_bytes: float) -> Any:
    """Return the result of ``run`` with this much free memory, free parts of reserved segments included."""
    in_use()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + num_bytes) / total)
    try:
        return run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def engine_around(layers: nn.ModuleList, **options: Any) -> Engine:
    return Engine(layers, guarded=True, device=CudaDevice(), host_bytes=2 * GIB, **options)


def test_a_run_that_dies_without_it_goes_on_with_it() -> None:
    layers = stack(6).cuda()
    plain = step(copy.deepcopy(layers))
    with engine_around(layers, swapped=()) as engine:
        step(layers)
        peak = peak_bytes(lambda: step(layers))
        assert engine.guard.take_rescues() == []
        for part in (0.8, 0.65):
            layers.zero_grad()
            assert limited(lambda: step(layers), part * peak).same_as(plain)
            assert engine.guard.take_rescues()
        layers.zero_grad()
        with pytest.raises(torch.OutOfMemoryError, match="guard has nothing more to evict"):
            limited(lambda: step(layers), 0.05 * peak)
        assert step(layers).same_as(plain)
    with pytest.raises(torch.OutOfMemoryError):
        limited(lambda: step(copy.deepcopy(layers)), 0.65 * peak)


def test_libraries_find_memory_where_pytorch_has_run_out() -> None:
    in_use()
    with engine_around(stack(1).cuda()):
        num_pieces = torch.cuda.mem_get_info()[0] // (64 * MIB)
        held: list[torch.Tensor] = []
        with pytest.raises(torch.OutOfMemoryError):
            held.extend(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(num_pieces))
        assert torch.cuda.mem_get_info()[0] > FREE_ALONE_BYTES - 64 * MIB
        del held
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
