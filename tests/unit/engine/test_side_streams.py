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
from megatron.swap.engine.shared_state import SharedState
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.host import HostTier
from tests.engine import EVERYTHING, save

LAST = LayerPosition(0, 0, True)


class Recorder(Device):
    """A device whose streams are names and whose copies happen at once."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.current = "main"
        self.log: list[tuple[str, str, str]] = []
        """Enqueued work in order: (what, stream, event)."""
        self.used: list[str] = []

    def current_stream(self) -> str:
        return self.current

    def copy_stream(self, name: str) -> str:
        return name

    def record(self, stream: str) -> str:
        self.log.append(("record", stream, event := f"{stream}#{len(self.log)}"))
        return event

    def wait(self, stream: str, event: str) -> None:
        self.log.append(("wait", stream, event))

    timed_wait = wait

    def has_passed(self, event: str) -> bool:
        return False

    def copy(self, stream, targets, sources) -> int:
        self.log.append(("copy", stream, ""))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return len(targets)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def used_on(self, storage: torch.UntypedStorage, stream: str) -> None:
        self.used.append(stream)

    def nothing(self, *_: object) -> None:
        return None

    peak_bytes = allocated_bytes = take_peak = reserved_bytes = peak_reserved_bytes = mark = nothing
    release_cached = discard = synchronize = close = nothing


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
    return {stream for what, stream, name in device.log if (what, name) == ("wait", event)}


def test_every_stream_that_reads_waits_for_the_copy_in_whoever_came_first() -> None:
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


def test_memory_that_a_side_stream_saved_is_released_behind_the_copy_on_the_main_stream_too() -> None:
    device = Recorder()
    _, _, handle, _, _ = swapped_out(device, "side")
    assert waited(device, handle.out_event) == {"side", "main"}


def test_a_site_counts_as_held_only_by_refusals_in_a_row() -> None:
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


def check_waits(log: list[tuple[str, str, str]], stream: str, compute: str) -> None:
    """Check that every copy on ``stream`` comes after an event that ``compute`` recorded in this part of the log."""
    recorded = {event for what, on, event in log if what == "record" and on == compute}
    is_behind = lambda what, event: what == "copy" or (what == "wait" and event in recorded)  # noqa: E731
    here = [what for what, on, event in log if on == stream and is_behind(what, event)]
    assert "copy" in here
    assert here[0] == "wait"


@pytest.mark.parametrize("saved_on", ["main", "side"])
def test_copies_wait_for_the_work_that_wrote_their_source_or_used_their_target(saved_on: str) -> None:
    device = Recorder()
    manager, group, *_ = swapped_out(device, saved_on)
    check_waits(device.log, "out", saved_on)
    since = len(device.log)
    manager.begin_backward(group)
    check_waits(device.log[since:], "in", "main")


def test_memory_belongs_to_the_stream_that_it_came_back_on() -> None:
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
    assert waited(device, "in#1") == {"side", "main"}
