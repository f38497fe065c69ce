"""How much of a GPU PyTorch may have, and what is asked of its allocator when there is none left."""

from __future__ import annotations

import pytest
import torch

from megatron.swap.devices import cuda
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.types import GIB, MIB

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FakeMemory:
    """A device's memory as torch.cuda tells of it: 160 GiB, 100 of them free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction = 1.0
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.limit)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB, 160 * GIB))
        monkeypatch.setattr(CudaDevice, "reserved_bytes", lambda _: 40 * GIB)
        self.device = object.__new__(CudaDevice)
        vars(self.device).update(torch_device=torch.device("cuda", 0), _fractions=None)

    def limit(self, fraction: float, _: object) -> None:
        self.fraction = fraction


@pytest.mark.parametrize(("num_ranks", "mine_gib"), [(1, 139.75), (2, 136)])
def test_a_guard_leaves_memory_for_libraries_and_gives_it_back(
    num_ranks: int, mine_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
    memory = FakeMemory(monkeypatch)
    memory.device.leave_free(True)
    assert memory.fraction == mine_gib / 160
    memory.device.leave_free(True)
    assert memory.fraction == mine_gib / 160
    memory.device.leave_free(False)
    assert memory.fraction == 1.0
    memory.device.leave_free(False)
    assert memory.fraction == 1.0


def test_what_a_guard_leaves_free_never_raises_a_limit_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch)
    memory.fraction = 0.5
    memory.device.leave_free(True)
    assert memory.fraction == 0.5
    memory.fraction = 0.25  # by somebody else, meanwhile
    memory.device.leave_free(False)
    assert memory.fraction == 0.25


def test_a_device_that_is_full_already_or_small_keeps_what_it_has() -> None:
    assert cuda.most_fraction(12 * GIB, 0, 16 * GIB, 2 * GIB) == 0.75
    assert cuda.most_fraction(0, 16 * GIB, 16 * GIB, 2 * GIB) == 15 / 16


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_full_device_is_asked_once() -> None:
    device = CudaDevice()
    assert device.allocate_if_free(1 << 50) is None
    assert device.take_retries() == 1
    assert device.allocate_if_free(1 << 50) is None
    assert device.take_retries() == 0
    found = device.allocate_if_free(MIB)
    assert found is not None
    assert found.numel() == MIB
    device.close()


@pytest.mark.parametrize(("fraction", "room_gib"), [(1.0, 110), (0.5, 50), (0.2, 10)])
def test_what_cannot_be_had_is_not_asked_for(monkeypatch: pytest.MonkeyPatch, fraction: float, room_gib: int) -> None:
    """100 GiB are free on the device, 10 of 40 are in the allocator; PyTorch may have a part of 160."""
    memory = FakeMemory(monkeypatch)
    memory.fraction = fraction
    held = {"reserved_bytes": {"all": {"current": 40 * GIB}}, "allocated_bytes": {"all": {"current": 30 * GIB}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: held)
    device, asked = memory.device, []

    def give_small(_: object, num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        if num_bytes > 2 * GIB:
            raise torch.OutOfMemoryError
        return torch.empty(0)

    monkeypatch.setattr(CudaDevice, "allocate", give_small)
    whole = room_gib * GIB
    assert device.allocate_if_free(whole + 1) is None
    assert device.allocate_if_free(whole + 1) is None
    assert device.allocate_if_free(whole) is None
    assert asked == [whole + 1, whole], "it said no, so one looks before; what may be there is asked for"
    asked.clear()
    assert len(device.allocate_all([GIB, 2 * GIB, whole - 2 * GIB, GIB], is_ahead=True)) == 2
    assert asked == [GIB, 2 * GIB], "together they are too large"
