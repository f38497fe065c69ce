"""State shared by offload and reload: the device, the tier, the copies in flight, and the guard's evictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from megatron.swap.common.counters import Counters
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.devices.base import Device
from megatron.swap.engine.fences import ReadFences
from megatron.swap.engine.handle import Handle, Orphans, StorageState
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.order import BackwardOrder
from megatron.swap.engine.release_budget import ReleaseBudget
from megatron.swap.memory.tiers.base import Tier


class OffloadQueue:
    """Handles whose copy to the tier is enqueued and that wait for their release, oldest first."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of all handles together
        self._handles: deque[Handle] = deque()

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def oldest(self) -> Handle:
        """The handle to release next."""
        return self._handles[0]

    def append(self, handle: Handle) -> None:
        """Add ``handle``, whose copy was enqueued last."""
        self._handles.append(handle)
        self.num_bytes += handle.num_bytes

    def pop_oldest(self) -> Handle:
        """Remove and return the oldest handle."""
        handle = self._handles.popleft()
        self.num_bytes -= handle.num_bytes
        return handle

    def put_back(self, handles: list[Handle]) -> None:
        """Put back ``handles``, oldest first, which were popped before."""
        self._handles.extendleft(reversed(handles))
        self.num_bytes += sum(handle.num_bytes for handle in handles)

    def remove(self, handle: Handle) -> None:
        """Remove ``handle``, if it is still queued."""
        if handle in self._handles:
            self._handles.remove(handle)
            self.num_bytes -= handle.num_bytes

    def clear(self) -> None:
        """Remove all handles."""
        self._handles.clear()
        self.num_bytes = 0


class SharedState:
    """State that offload and reload share. The guard may evict on any thread; byte counts follow when it is seen."""

    def __init__(
        self, device: Device, tier: Tier, ranges: Ranges, guard: OomGuard, release_budget: ReleaseBudget
    ) -> None:
        self.device = device
        self.tier = tier
        self.ranges = ranges
        self.guard = guard
        self.release_budget = release_budget  # limits the bytes in flight
        self.counters = Counters()
        self.order = BackwardOrder()  # groups in the order in which backward needs them
        self.fences = ReadFences(device)  # reads of slots that may still be in flight
        self.offloading = OffloadQueue()  # storages that wait for their release
        self.orphans: Orphans = Orphans()  # storages whose handle was freed during a copy
        self.main_stream = device.current_stream()  # the compute stream of the last forward

    def free_orphans(self) -> None:
        """Free storages whose handles were freed during a copy (of a prefetched tensor that backward skipped, say)."""
        while self.orphans:
            storage, event = self.orphans.popleft()
            for stream in dict.fromkeys((self.device.current_stream(), self.main_stream)):
                self.device.wait(stream, event)
            del storage  # now its block may be reused: all later work is ordered behind the copy

    def reacquire(self, handle: Handle) -> bool:
        """Protect ``handle`` from eviction from now on. Return whether it was evicted before."""
        if not handle.offer:
            return False  # as always without a guard
        before = self.guard.reacquire(handle)
        if before is StorageState.OFFLOADING:
            self.offloading.remove(handle)
        elif before is StorageState.RELOADING:
            handle.group.prefetched_bytes -= handle.num_bytes
            handle.group.prefetch_evicted = True
        elif before is StorageState.RESIDENT:
            handle.group.num_bytes += handle.num_bytes
            self.release_budget.note_size(handle.group)
            handle.group.kept_bytes -= handle.num_bytes
            self.counters.layers[handle.site.layer].out_bytes += handle.num_bytes
        return before is not None

    def find_evicted(self) -> None:
        """Account for every eviction since the last call."""
        for handle in self.guard.evicted():
            self.reacquire(handle)
        self.guard.tidy(self.fences.have_passed)


def num_bytes_of(handles: Iterable[Handle]) -> int:
    """Return the total bytes of ``handles``."""
    return sum(handle.num_bytes for handle in handles)
