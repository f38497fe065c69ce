"""Reload: copies of storages from the tier, prefetched before backward needs them, or on demand.

Buffers come from the compute stream's pool. The H2D stream waits for the compute stream, since the block may be
recycled, and for the storage's own copy out. The compute stream waits when the tensor is unpacked.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby

import torch

from megatron.swap.common.types import SwapError
from megatron.swap.devices.base import Owner, Stream
from megatron.swap.engine.checksum import VerifyError, checksum
from megatron.swap.engine.collector import end_delay
from megatron.swap.engine.handle import Group, Handle, StorageState
from megatron.swap.engine.shared_state import SharedState, num_bytes_of
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.recording import BRING_BACK


class Reloader:
    """Copies storages from the tier to the device, in the order in which backward needs them."""

    def __init__(self, state: SharedState, observer: Observer | None = None) -> None:
        self.lane = state.device.copier.lane("in", Owner.ACTIVATIONS)
        self._state = state
        self._device = state.device
        self._counters = state.counters
        self._observer = observer
        self._is_closed = False

    def begin_backward(self, group: Group) -> None:
        """Begin the backward of ``group``: reload its missing storages, prefetch later groups. Idempotent."""
        state = self._state
        if not state.order.begin_backward(group):
            return
        if state.order.is_empty:
            end_delay()
        state.ranges.backward(group)
        state.free_orphans()
        state.find_evicted()
        group.prefetched_bytes = 0
        late: list[Handle] = []
        for handle in group.in_backward_order():
            if not self._claim(handle):
                late.append(handle)
        self._counters.num_late += len(late)
        self._reload(late)
        self.prefetch()

    def fetch(self, handle: Handle, group: Group, index: int) -> torch.UntypedStorage:
        """Return the storage of ``handle``, because autograd unpacks saved tensor number ``index`` on it.

        Raises a ``RuntimeError`` if the tensor was changed in place since, and with ``verify`` a ``VerifyError`` if
        bytes differ.
        """
        if not group.backward_begun:
            self.begin_backward(group)
        if handle.aliases:
            handle.aliases[index].check(str(handle.site))
        compute = self._device.current_stream()
        if not self._claim(handle):
            self._counters.num_late += 1
            self._reload([handle])
        if handle.state is StorageState.RELOADING:
            # The compute stream waits only here, at the first use.
            with self._state.ranges.storage("wait", handle):
                self._counters.add_stall(self._device.timed_wait(compute, handle.in_event))
            handle.move_to(StorageState.RELOADED)
            _check(handle)
        elif handle.state is StorageState.KEPT and handle.out_event is not None:
            # A cancelled copy out still reads this memory, which may be freed soon after.
            with self._state.ranges.storage("wait", handle):
                self._counters.add_stall(self._device.timed_wait(compute, handle.out_event))
            handle.out_event = None
        elif handle.state is StorageState.RELOADED:
            # Another stream may have waited first. This wait costs nothing once the event has passed.
            self._device.wait(compute, handle.in_event)
        storage = handle.storage
        assert storage is not None
        if handle.state is StorageState.RELOADED:
            if compute != handle.stream:
                self._device.used_on(storage, compute)
            handle.num_unpacked += 1
            if handle.num_unpacked == handle.num_packed:
                # The last tensor on it was unpacked: from here on only its user holds it, as in plain autograd.
                # The slot stays, because a second backward over a retained graph reloads it.
                handle.storage = None
                handle.num_unpacked = 0
                handle.move_to(StorageState.OFFLOADED)
        return storage

    def prefetch(self) -> None:
        """Reload the storages that backward needs next, in order, as far as the budget allows."""
        state = self._state
        prefetched_bytes = state.order.prefetched_bytes()
        num_kept_between = kept_between_bytes = 0
        coming: list[Handle] = []
        for group in state.order.upcoming():
            if group.prefetch_evicted:
                break
            if not group.num_bytes:
                num_kept_between += 1
                kept_between_bytes += group.kept_bytes
                continue
            allowed_bytes = state.release_budget.max_prefetched_bytes(
                group, state.order.current, num_kept_between, kept_between_bytes
            )
            kept_between_bytes += group.kept_bytes
            for handle in group.in_backward_order():
                if handle.state not in (StorageState.OFFLOADED, StorageState.OFFLOADING) or handle in coming:
                    continue
                # Even a window smaller than a storage allows one storage.
                if prefetched_bytes + handle.num_bytes > allowed_bytes and (prefetched_bytes or not allowed_bytes):
                    self._reload(coming, is_prefetch=True)
                    self._expect()
                    return
                # A cancelled offload counts too: its storage takes device memory until its backward.
                prefetched_bytes += handle.num_bytes
                group.prefetched_bytes += handle.num_bytes
                if not self._claim(handle):
                    coming.append(handle)
        self._reload(coming, is_prefetch=True)
        self._expect()

    def close(self) -> None:
        """Refuse all later reloads."""
        self._is_closed = True

    def _claim(self, handle: Handle) -> bool:
        """Cancel an offload that is not released. Return False if ``handle`` is off the device and must be reloaded."""
        self._state.reacquire(handle)
        if handle.state is StorageState.OFFLOADING:
            self._state.offloading.remove(handle)
            handle.move_to(StorageState.KEPT)
            handle.free_slot()  # later writes into this slot are on the same stream, behind the copy
        elif handle.state is StorageState.RESIDENT:
            handle.move_to(StorageState.KEPT)
        return handle.state is not StorageState.OFFLOADED

    def _reload(self, handles: list[Handle], *, is_prefetch: bool = False) -> None:
        """Enqueue the copies to the device, in this order. A prefetch stops early if memory is short."""
        if not handles:
            return
        if self._is_closed:
            raise SwapError(
                f"{handles[0].label}: swapping was closed while this tensor was in host memory, so backward cannot "
                "reload it. Close after the last backward."
            )
        state, compute = self._state, self._device.current_stream()
        label = "prefetch" if is_prefetch else "swap_in"
        with state.ranges.mark(f"{BRING_BACK} {len(handles)}"):
            coming_slots = deque(handle.slot for handle in handles if handle.slot is not None)
            state.tier.expect(coming_slots)
            buffers = self._device.allocate_all([handle.num_bytes for handle in handles], is_ahead=is_prefetch)
            for handle in handles[len(buffers) :]:
                handle.group.prefetched_bytes -= handle.num_bytes
                handle.group.prefetch_evicted = True
            # The buffers may be recycled blocks: earlier kernels of the compute stream may still use them.
            self.lane.begin(compute)
            for group, coming in groupby(zip(handles, buffers, strict=False), key=lambda pair: pair[0].group):
                pairs = list(coming)
                with state.ranges.group(label, group, num_bytes_of(handle for handle, _ in pairs)):
                    for handle, buffer in pairs:
                        coming_slots.popleft()
                        self._read(handle, buffer, compute)
                        if is_prefetch:  # else it is used at once
                            state.guard.offer(handle, state.order.next_use(group), handle.in_event, is_copied=True)
                        state.tier.expect(coming_slots)
        state.ranges.memory()

    def _read(self, handle: Handle, buffer: torch.Tensor, compute: Stream) -> None:
        assert handle.slot is not None
        # The storage's own copy out may still be in flight.
        self.lane.wait(handle.out_event)
        with self._state.ranges.storage("copy_in", handle, handle.num_bytes):
            num_copies = self._state.tier.read(self._device, self.lane.stream, handle.slot, buffer)
        handle.move_to(StorageState.RELOADING)
        handle.in_event = self.lane.end()
        handle.storage = buffer.untyped_storage()
        if self._observer is not None:
            self._observer.note(buffer)  # it takes memory before it is used
        self._state.ranges.arrived(handle, handle.storage)
        handle.stream = compute
        handle.in_fence = self._state.fences.add(handle.in_event)
        self._counters.num_in_copies += num_copies
        self._counters.layers[handle.site.layer].in_bytes += handle.num_bytes

    def _expect(self) -> None:
        """Announce to the tier the slots that are read next."""
        self._state.tier.expect(
            handle.slot
            for group in self._state.order.upcoming()
            for handle in group.in_backward_order()
            if handle.state is StorageState.OFFLOADED and handle.slot is not None
        )


def _check(handle: Handle) -> None:
    """Compare the reloaded bytes with the checksum computed when they were saved."""
    if handle.checksum is not None and not torch.equal(checksum(handle.bytes_view()), handle.checksum):
        raise VerifyError(
            f"{handle.site} ({handle.num_bytes} bytes) came back different from what autograd saved. Either something "
            "wrote to the tensor after it was saved, or a copy went wrong. Please report this; until then do not swap "
            f"layer {handle.site.layer}."
        )
