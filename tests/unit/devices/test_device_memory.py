"""The fraction of a GPU's memory that PyTorch may take, and what is allocated if there is no room for all."""

import pytest
import torch

from megatron.swap.common.types import GIB
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice


class FakeMemory:
    """A fake of torch.cuda's memory functions: 160 GiB, 100 of them free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction = 1.0
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.limit)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB, 160 * GIB))
        monkeypatch.setattr(CudaDevice, "reserved_bytes", lambda _: 40 * GIB)
        self.device = object.__new__(CudaDevice)
        vars(self.device).update(torch_device=torch.device("cuda", 0), _limit=None)

    def limit(self, fraction: float, _: object) -> None:
        self.fraction = fraction


@pytest.mark.parametrize(("num_ranks", "mine_gib"), [(1, 139.75), (2, 136)])
def test_a_guard_leaves_memory_for_libraries_and_gives_it_back(
    num_ranks: int, mine_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: num_ranks)
    memory = FakeMemory(monkeypatch)
    for leaves, fraction in ((True, mine_gib / 160), (True, mine_gib / 160), (False, 1.0), (False, 1.0)):
        memory.device.leave_free(leaves)
        assert memory.fraction == fraction


def test_what_a_guard_leaves_free_never_raises_a_limit_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch)
    memory.fraction = 0.5
    memory.device.leave_free(True)
    assert memory.fraction == 0.5
    memory.fraction = 0.25  # set by somebody else in the meantime
    memory.device.leave_free(False)
    assert memory.fraction == 0.25


def test_what_is_allocated_ahead_ends_at_the_first_that_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller pairs the buffers with its storages in order, so none may be left out in the middle."""
    device = EmulatedDevice()
    allocate = device.allocate

    def with_little_room(num_bytes: int) -> torch.Tensor:
        if num_bytes > 100:
            raise torch.OutOfMemoryError("no room")
        return allocate(num_bytes)

    monkeypatch.setattr(device, "allocate", with_little_room)
    assert [found.numel() for found in device.allocate_all([10, 50, 200, 20], is_ahead=True)] == [10, 50]
    with pytest.raises(torch.OutOfMemoryError):
        device.allocate_all([10, 200, 20], is_ahead=False)
