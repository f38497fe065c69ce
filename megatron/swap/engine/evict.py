"""Evictions by the out-of-memory guard: what was taken from the device is noted, so that it is reloaded in time."""

from __future__ import annotations

from megatron.swap.engine.handle import Handle, StorageState
from megatron.swap.engine.shared_state import SharedState


class Evictions:
    """Brings the engine's figures up to date with what the guard has evicted, on whatever thread that was."""

    def __init__(self, state: SharedState) -> None:
        self._state = state

    def reacquire(self, handle: Handle) -> bool:
        """From now on the guard does not evict ``handle``. Return whether it had."""
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
        """Note what the guard has evicted since the last call."""
        for handle in self._state.guard.evicted():
            self.reacquire(handle)
        self._state.guard.tidy(self._state.fences.have_passed)
