"""Accounting of the out-of-memory guard's evictions, so that evicted storages are reloaded in time."""

from __future__ import annotations

from megatron.swap.engine.handle import Handle, StorageState
from megatron.swap.engine.shared_state import SharedState


class Evictions:
    """Updates the engine's byte counts after evictions, which may happen on any thread."""

    def __init__(self, state: SharedState) -> None:
        self._state = state

    def reacquire(self, handle: Handle) -> bool:
        """Protect ``handle`` from eviction from now on. Return whether it was evicted before."""
        if not handle.offer:
            return False  # as always without a guard
        before = self._state.guard.reacquire(handle)
        if before is StorageState.OFFLOADING:
            self._state.offloading.remove(handle)
        elif before is StorageState.RELOADING:
            handle.group.prefetched_bytes -= handle.num_bytes
            handle.group.prefetch_evicted = True
        elif before is StorageState.RESIDENT:
            handle.group.num_bytes += handle.num_bytes
            self._state.release_budget.note_size(handle.group)
            handle.group.kept_bytes -= handle.num_bytes
            self._state.counters.layers[handle.site.layer].out_bytes += handle.num_bytes
        return before is not None

    def find_evicted(self) -> None:
        """Account for every eviction since the last call."""
        for handle in self._state.guard.evicted():
            self.reacquire(handle)
        self._state.guard.tidy(self._state.fences.have_passed)
