"""Waits between streams, on a device that only records them.

The emulation's compute stream never lags behind its caller, so a copy that does not wait for compute shows only here
(and on a GPU). So do layers that compute on more than one stream (Megatron's shared experts).
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from megatron.swap.common.types import LayerPosition, Site
from megatron.swap.devices.base import Device
from megatron.swap.engine.handle import Handle, StorageState
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.reload import Reloader
from megatron.swap.engine.shared_state import SharedState
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.host import HostTier
from tests.engine import EVERYTHING, plant_fault, save

LAST = LayerPosition(0, 0, True)


class Recorder(Device):
    """A device whose streams are names and whose copies happen at once. ``waits`` has (stream, event)."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.current = "main"
        self.waits: list[tuple[str, str]] = []
        self.log: list[tuple[str, str, str]] = []
        """Enqueued work in order: (what, stream, event)."""
        self.used: list[str] = []
        self._num_events = 0

    def current_stream(self) -> str:
        return self.current

    def copy_stream(self, name: str) -> str:
        return name

    def record(self, stream: str) -> str:
        self._num_events += 1
        self.log.append(("record", stream, event := f"{stream}#{self._num_events}"))
        return event

    def wait(self, stream: str, event: str) -> None:
        self.waits.append((stream, event))
        self.log.append(("wait", stream, event))

    def timed_wait(self, stream: str, event: str) -> None:
        self.wait(stream, event)

    def has_passed(self, event: str) -> bool:
        return False

    def copy(self, stream, targets, sources) -> int:
        self.log.append(("copy", stream, ""))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return len(targets)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def discard(self, storage: torch.UntypedStorage) -> None:
        pass

    def used_on(self, storage: torch.UntypedStorage, stream: str) -> None:
        self.used.append(stream)

    def peak_bytes(self) -> None:
        return None

    def allocated_bytes(self) -> None:
        return None

    def take_peak(self) -> None:
        return None

    def reserved_bytes(self) -> None:
        return None

    def peak_reserved_bytes(self) -> None:
        return None

    def release_cached(self) -> None:
        pass

    def mark(self) -> None:
        raise AssertionError("nobody measures here")

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


def swapped_out(device: Recorder, saved_on: str):
    """Return an offloaded storage with two saved tensors."""
    pool = HostPool(limit=1 << 26, slab_bytes=1 << 24, pinned=False)
    manager = SwapManager(device, HostTier(pool), EVERYTHING)
    group = manager.begin_forward(0, LAST)
    tensor = torch.arange(4096.0)
    device.current = saved_on
    handle, first = save(manager, tensor, Site(0, "shared_experts", 0), group)
    _, second = save(manager, tensor[:10], Site(0, "router", 0), group)
    device.current = "main"
    del tensor
    manager.end_forward(group)
    manager.begin_forward(1, LAST)
    assert handle.state is StorageState.OFFLOADED
    return manager, group, handle, first, second


def waited(device: Recorder, event: str) -> set[str]:
    return {stream for stream, name in device.waits if name == event}


def test_every_stream_that_reads_waits_for_the_copy_in_whoever_came_first():
    device = Recorder()
    manager, group, handle, first, second = swapped_out(device, "main")
    manager.begin_backward(group)
    arrived = handle.in_event
    device.current = "side"
    manager.reload.fetch(handle, group, first)
    assert waited(device, arrived) == {"side"}
    assert device.used == ["side"]
    device.current = "main"
    manager.reload.fetch(handle, group, second)
    assert waited(device, arrived) == {"side", "main"}


def test_memory_that_a_side_stream_saved_is_released_behind_the_copy_on_the_main_stream_too():
    device = Recorder()
    _, _, handle, _, _ = swapped_out(device, "side")
    assert waited(device, handle.out_event) == {"side", "main"}


def test_a_site_counts_as_held_only_by_refusals_in_a_row():
    device = Recorder()
    pool = HostPool(limit=1 << 26, slab_bytes=1 << 24, pinned=False)
    manager = SwapManager(device, HostTier(pool), EVERYTHING)

    def run(held: bool) -> Handle | None:
        group = manager.begin_forward(0, LAST)
        tensor = torch.arange(4096.0)
        taken = save(manager, tensor, Site(0, "mlp", 0), group)
        manager.end_forward(group)
        if not held:
            del tensor
        for layer in (1, 2):  # the next one may still have it as its input
            manager.begin_forward(layer, LAST)
        return taken[0] if taken else None

    states = [handle.state for held in (True, False, True, False) if (handle := run(held)) is not None]
    assert states == [StorageState.KEPT, StorageState.OFFLOADED, StorageState.KEPT, StorageState.OFFLOADED]
    assert run(held=True) is not None
    assert run(held=True) is not None
    assert run(held=True) is None


def waits_for_compute(device: Recorder, stream: str, compute: str, since: int) -> bool:
    """Whether every copy on ``stream`` comes after an event that ``compute`` recorded after position ``since``."""
    is_behind = num_copies = 0
    recorded: set[str] = set()
    for what, on, event in device.log[since:]:
        if what == "record" and on == compute:
            recorded.add(event)
        elif what == "wait" and on == stream and event in recorded:
            is_behind = 1
        elif what == "copy" and on == stream:
            num_copies += 1
            if not is_behind:
                return False
    assert num_copies
    return True


def copies_wait_for_compute(saved_on: str) -> tuple[bool, bool]:
    """Return whether the offloads, and the reloads, of a storage wait for the work before them."""
    device = Recorder()
    manager, group, *_ = swapped_out(device, saved_on)
    is_out_behind = waits_for_compute(device, "out", saved_on, since=0)
    since = len(device.log)
    manager.begin_backward(group)
    return is_out_behind, waits_for_compute(device, "in", "main", since)


@pytest.mark.parametrize("saved_on", ["main", "side"])
def test_copies_wait_for_the_work_that_wrote_their_source_or_used_their_target(saved_on: str):
    assert copies_wait_for_compute(saved_on) == (True, True)


def test_a_copy_out_that_does_not_wait_for_compute_is_noticed(monkeypatch: pytest.MonkeyPatch):
    wait = "self.lane.begin(*dict.fromkeys(handle.stream for handle in going))"
    plant_fault(monkeypatch, Offloader, "_commit", wait, "pass")
    assert copies_wait_for_compute("main") == (False, True)


def test_a_copy_in_that_does_not_wait_for_compute_is_noticed(monkeypatch: pytest.MonkeyPatch):
    plant_fault(
        monkeypatch, Reloader, "_reload",
        "self.lane.begin(compute)", "pass",
    )  # fmt: skip
    assert copies_wait_for_compute("main") == (True, False)


def test_memory_belongs_to_the_stream_that_it_came_back_on():
    device = Recorder()
    manager, group, handle, first, second = swapped_out(device, "main")
    device.current = "side"
    manager.begin_backward(group)
    assert handle.stream == "side"
    manager.reload.fetch(handle, group, first)
    assert device.used == []
    device.current = "main"
    manager.reload.fetch(handle, group, second)
    assert device.used == ["main"]


def test_memory_that_nobody_took_is_freed_behind_its_copy_on_both_streams() -> None:
    """The allocator gives it to the main stream's work next, whatever stream frees it."""
    device = Recorder()
    state = SharedState(device, Mock(), Mock(), Mock(), Mock())
    device.current = "side"
    state.orphans.append((torch.ones(1).untyped_storage(), "in#1"))
    state.free_orphans()
    assert {stream for stream, event in device.waits if event == "in#1"} == {"side", "main"}
