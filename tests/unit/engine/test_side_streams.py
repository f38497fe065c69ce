"""Waits between streams, on a device that only records them.

The emulation's compute stream never lags behind its caller, so a copy that does not wait for compute shows only here
(and on a GPU). So do layers that compute on more than one stream (Megatron's shared experts).
"""

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch

from megatron.swap.common.types import LayerPosition, Site
from megatron.swap.engine.handle import StorageState
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.shared_state import SharedState
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.host import HostTier
from tests.engine import EVERYTHING, save
from tests.lazy_device import LazyDevice, LazyEvent, LazyStream

LAST = LayerPosition(0, 0, True)


class Recorder(LazyDevice):
    """A device that logs what is enqueued, and whose copies happen at once."""

    def __init__(self) -> None:
        super().__init__(eager=("out", "in"))
        self.main, self.side = self.compute, LazyStream("side")
        self.log: list[tuple[str, str, LazyEvent | None]] = []
        """Enqueued work in order: (what, stream, event)."""
        self.used: list[str] = []

    def record(self, stream: LazyStream) -> LazyEvent:
        self.log.append(("record", stream.name, event := super().record(stream)))
        return event

    def wait(self, stream: LazyStream, event: LazyEvent) -> None:
        self.log.append(("wait", stream.name, event))
        super().wait(stream, event)

    def has_passed(self, event: LazyEvent) -> bool:
        return False

    def copy(self, stream: LazyStream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        self.log.append(("copy", stream.name, None))
        return super().copy(stream, targets, sources)

    def used_on(self, storage: torch.UntypedStorage, stream: LazyStream) -> None:
        self.used.append(stream.name)


def swapped_out(device: Recorder, saved_on: LazyStream):
    """Return an offloaded storage with two saved tensors."""
    pool = HostPool(limit=1 << 26, slab_bytes=1 << 24, pinned=False)
    manager = SwapManager(device, HostTier(pool), EVERYTHING)
    group = manager.begin_forward(0, LAST)
    tensor = torch.arange(4096.0)
    device.compute = saved_on
    handle, first = save(manager, tensor, Site(0, "shared_experts", 0), group)
    _, second = save(manager, tensor[:10], Site(0, "router", 0), group)
    device.compute = device.main
    del tensor
    manager.end_forward(group)
    manager.begin_forward(1, LAST)
    assert handle.state is StorageState.OFFLOADED
    return manager, group, handle, first, second


def waited(device: Recorder, event: LazyEvent) -> set[str]:
    return {stream for what, stream, other in device.log if what == "wait" and other is event}


def test_every_stream_that_reads_waits_for_the_copy_in_whoever_came_first() -> None:
    device = Recorder()
    manager, group, handle, first, second = swapped_out(device, device.main)
    manager.begin_backward(group)
    arrived = handle.in_event
    device.compute = device.side
    manager.reload.fetch(handle, group, first)
    assert waited(device, arrived) == {"side"}
    assert device.used == ["side"]
    device.compute = device.main
    manager.reload.fetch(handle, group, second)
    assert waited(device, arrived) == {"side", "compute"}


def test_memory_that_a_side_stream_saved_is_released_behind_the_copy_on_the_main_stream_too() -> None:
    device = Recorder()
    _, _, handle, _, _ = swapped_out(device, device.side)
    assert waited(device, handle.out_event) == {"side", "compute"}


def check_waits(log: list[tuple[str, str, LazyEvent | None]], stream: str, compute: str) -> None:
    """Check that every copy on ``stream`` comes after an event that ``compute`` recorded in this part of the log."""
    recorded = {event for what, on, event in log if what == "record" and on == compute}
    is_behind = lambda what, event: what == "copy" or (what == "wait" and event in recorded)  # noqa: E731
    here = [what for what, on, event in log if on == stream and is_behind(what, event)]
    assert "copy" in here
    assert here[0] == "wait"


@pytest.mark.parametrize("saved_on", ["compute", "side"])
def test_copies_wait_for_the_work_that_wrote_their_source_or_used_their_target(saved_on: str) -> None:
    device = Recorder()
    manager, group, *_ = swapped_out(device, device.side if saved_on == "side" else device.main)
    check_waits(device.log, "out", saved_on)
    since = len(device.log)
    manager.begin_backward(group)
    check_waits(device.log[since:], "in", "compute")


def test_memory_that_nobody_took_is_freed_behind_its_copy_on_both_streams() -> None:
    """The allocator gives it to the main stream's work next, whatever stream frees it."""
    device = Recorder()
    state = SharedState(device, Mock(), Mock(), Mock(), Mock())
    device.compute = device.side
    event = device.record(device.main)
    state.orphans.append((torch.ones(1).untyped_storage(), event))
    state.free_orphans()
    assert waited(device, event) == {"side", "compute"}
