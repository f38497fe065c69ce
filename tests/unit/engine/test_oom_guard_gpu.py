"""The out-of-memory guard on a CUDA device, with a limit on this process's memory."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.mark.parametrize("swapped", [(), (0, 2, 4)], ids=["kept", "some swapped"])
def test_a_run_that_dies_without_it_goes_on_with_it(swapped: tuple[int, ...]) -> None:
    layers = stack(6).cuda()
    plain = step(copy.deepcopy(layers))
    with engine_around(layers, swapped=swapped) as engine:
        step(layers)
        peak = peak_bytes(lambda: step(layers))
        assert engine.guard.take_rescues() == []
        rescued = []
        for part in (0.8, 0.65):
            layers.zero_grad()
            assert limited(lambda: step(layers), part * peak).same_as(plain)
            rescued.append(bool(engine.guard.take_rescues()))
        assert any(rescued)
        assert all(rescued) or swapped  # what that needs varies: how soon is a layer's memory back?
        layers.zero_grad()
        with pytest.raises(torch.OutOfMemoryError, match="guard has nothing more to evict"):
            limited(lambda: step(layers), 0.05 * peak)
        assert step(layers).same_as(plain)
    if not swapped:
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


def test_a_second_stream_runs_out_at_the_same_time() -> None:
    """Backward allocates on autograd's thread, the other thread on a stream of its own. Both get their memory in steps
    that need rescues, and the results are equal."""
    layers = stack(4).cuda()
    plain = step(copy.deepcopy(layers))
    over = threading.Event()
    failed: list[BaseException] = []
    num_got = 0

    def allocate() -> None:
        nonlocal num_got
        stream = torch.cuda.Stream()
        while not over.is_set():
            try:
                with torch.cuda.stream(stream):
                    torch.full((16 * MIB,), 7, dtype=torch.uint8, device="cuda").add_(1)
                num_got += 1
            except torch.OutOfMemoryError:
                pass
            except BaseException as error:
                failed.append(error)
                return

    with engine_around(layers, swapped=(1,)) as engine:
        step(layers)
        peak = peak_bytes(lambda: step(layers))
        other = threading.Thread(target=allocate)
        other.start()
        rescued: list[tuple[int, int, int]] = []
        for percent in range(90, 30, -2):  # how soon a swapped layer's memory is back, and what it takes, varies
            layers.zero_grad()
            engine.guard.take_rescues()
            got_before = num_got
            try:
                assert limited(lambda: step(layers), percent / 100 * peak).same_as(plain)
            except torch.OutOfMemoryError:
                continue
            rescued.append((percent, len(engine.guard.take_rescues()), num_got - got_before))
        over.set()
        other.join(120)
        assert not other.is_alive()
        assert not failed
        print("part of the peak, rescues, allocations beside:", rescued)
        assert any(num_rescues and num_beside for _, num_rescues, num_beside in rescued), rescued


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_500_rescues_leave_nothing_behind() -> None:
    layers = stack(4).cuda()
    plain = step(copy.deepcopy(layers))
    with engine_around(layers, swapped=(1, 2)) as engine:
        step(layers)
        peak = peak_bytes(lambda: step(layers))
        assert engine.guard._core is not None
        num_rescues = 0
        figures: list[tuple[int, ...]] = []
        resident: list[int] = []
        while num_rescues < 500:
            layers.zero_grad()
            assert limited(lambda: step(layers), 0.65 * peak).same_as(plain)
            rescues = engine.guard.take_rescues()
            assert rescues
            num_rescues += len(rescues)
            layers.zero_grad()
            on_device = in_use()
            left = len(engine.guard._offered), engine.num_leases
            figures.append((on_device, torch.cuda.memory_reserved(), engine.guard._core.mapped_bytes(), *left))
            resident.append(resident_bytes())
        settled = len(figures) // 4
        assert len(set(figures[settled:])) == 1, figures
        assert figures[-1][3:] == (0, 0)
        assert resident[-1] < resident[settled] + 32 * MIB
