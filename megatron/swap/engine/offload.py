"""Offload: the copy of a saved storage to the tier, until its device memory is released.

The D2H stream waits for the compute stream, copies, and records an event. The compute stream waits for this event only
at the release, a bounded number of bytes later. So each reuse of the block is ordered behind the copy. No
``record_stream`` is needed, and nothing depends on how far the host is ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.swap.common.types import MIB, Action, LayerPosition, Site, SwapError
from megatron.swap.devices.base import Owner
from megatron.swap.engine.checksum import checksum
from megatron.swap.engine.decider import Decider
from megatron.swap.engine.decision import Decision, Reason
from megatron.swap.engine.handle import Group, Handle, StorageState, alias_of
from megatron.swap.engine.shared_state import SharedState, num_bytes_of

# Copies start once this much is pending: copies from 16 MiB run at 99 % of a PCIe 5 link's speed.
COMMIT_BYTES = 16 * MIB


class Running(NamedTuple):
    """The layer whose forward began last."""

    # Does not hold the group, which must be freed with its graph.
    layer: int
    position: LayerPosition
    sequence: int


class Offloader:
    """Copies storages to the tier and releases them. A full tier calls ``on_full``, or is an error without it."""

    def __init__(
        self, state: SharedState, decider: Decider, verify: bool, on_full: Callable[[SwapError], None] | None
    ) -> None:
        self.lane = state.device.copier.lane("out", Owner.ACTIVATIONS)
        self._state = state
        self._device = state.device
        self._counters = state.counters
        self._decider = decider
        self._verify = verify
        self._on_full = on_full
        # Storages that are alive on the device, by the address of their StorageImpl. Addresses are reused, so an entry
        # is valid only while its handle still holds that storage.
        self._live: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        # Of the running layer: handles whose copy is not enqueued yet, and all handles that it saved.
        self._pending: list[Handle] = []
        self._pending_bytes = 0
        self._saved: list[Handle] = []
        self._running: Running | None = None

    # ------------------------------------------------------------------ saved tensors

    def find(self, storage: torch.UntypedStorage) -> Handle | None:
        """Return the handle of ``storage``, if it was saved before and has been on the device since."""
        handle = self._live.get(storage._cdata)
        if handle is None or handle.storage is None or handle.storage._cdata != storage._cdata:
            return None
        return handle

    def new_handle(self, storage: torch.UntypedStorage, site: Site, group: Group, decision: Decision) -> Handle | None:
        """Return a new handle for a saved ``storage``, or None for a kept storage that the guard may not evict."""
        is_kept = decision.action is Action.KEEP
        if is_kept:
            self.account_kept(storage, group)
            if not self._state.guard.wants(storage.nbytes()):
                return None
        handle = Handle(site, group, storage, self._device.current_stream(), self._state.orphans, decision)
        self._live[storage._cdata] = handle
        if not is_kept:
            self._pending.append(handle)
            self._pending_bytes += handle.num_bytes
        return handle

    def join(self, tensor: torch.Tensor, handle: Handle, group: Group) -> int:
        """Note that ``group`` saves ``tensor`` on the storage of ``handle``. Return its index on the handle."""
        if handle.is_kept_by_decision:
            self.account_kept(tensor.untyped_storage(), group)
            handle.group = group  # backward reaches the last group first
        self._state.reacquire(handle)  # the offer counts owners, and another one follows
        self._saved.append(handle)
        if not handle.num_packed or not group.has(handle):
            group.add(handle)
        if handle.state is StorageState.OFFLOADING and not any(one.counts_with(tensor) for one in handle.aliases):
            # What was written through this tensor after the copy began is not in the tier, and no version shows it.
            self._state.offloading.remove(handle)
            self._keep(handle, Reason.CHANGED)
        index = handle.num_packed
        handle.num_packed += 1
        handle.aliases.append(alias_of(tensor))
        # Waiting for a wide layer's end would leave the link idle.
        if self._pending_bytes >= COMMIT_BYTES:
            self._commit()
            self.release()
        return index

    def account_kept(self, storage: torch.UntypedStorage, group: Group) -> None:
        """Note that the running layer keeps ``storage``, which leaves less slack for copies in flight."""
        if self._state.release_budget.account_kept(storage, group):
            self.release()

    # ------------------------------------------------------------------ a layer's forward

    def discard_unfinished(self) -> None:
        """Forget what the layer before has saved, if its forward did not end."""
        self._saved.clear()
        self._pending, self._pending_bytes = [], 0

    def begin_forward(self, group: Group) -> None:
        """Begin the forward of the layer of ``group``."""
        self._running = Running(group.key.layer, group.position, group.sequence)
        self.release()

    def end_forward(self, group: Group) -> None:
        """End the forward of the layer of ``group``: enqueue pending copies, and offer its storages to the guard."""
        self._commit()
        if self._verify and self._state.guard.is_on:  # which may evict what was not copied
            for handle in self._saved:
                self._note_checksum(handle)
        self._state.guard.offer_all(self._saved, self._state.order.next_use(group))
        self._saved.clear()

    def _commit(self) -> None:
        """Enqueue all pending copies."""
        batch, self._pending = self._pending, []
        self._pending_bytes = 0
        going = [handle for handle in batch if self._reserve_slot(handle)]
        if not going:
            return
        state = self._state
        with state.ranges.group("swap_out", going[0].group, num_bytes_of(going)):
            # The copies wait for the kernels that computed the storages, on each stream that saved some.
            self.lane.begin(*dict.fromkeys(handle.stream for handle in going))
            for handle in going:
                assert handle.slot is not None
                if self._verify:
                    self._note_checksum(handle)
                with state.ranges.storage("copy_out", handle, handle.num_bytes):
                    num_copies = state.tier.write(self._device, self.lane.stream, handle.slot, handle.bytes_view())
                handle.move_to(StorageState.OFFLOADING)
                handle.out_event = self.lane.end()
                state.offloading.append(handle)
                self._counters.num_out_copies += num_copies
                self._counters.layers[handle.site.layer].out_bytes += handle.num_bytes

    def _note_checksum(self, handle: Handle) -> None:
        """Compute the checksum of a storage that is not copied yet."""
        # Right before the copy, not at the save: parts of a storage may be written one after the other.
        if handle.checksum is None and handle.storage is not None:
            compute = self._device.current_stream()
            if handle.stream != compute:
                self._device.wait(compute, self._device.record(handle.stream))
            handle.checksum = checksum(handle.bytes_view())

    def _reserve_slot(self, handle: Handle) -> bool:
        """Reserve a slot in the tier for ``handle``. Return False if the storage is kept instead."""
        if handle.state is not StorageState.RESIDENT:
            return False  # backward came first
        if handle.changed():
            self._keep(handle, Reason.CHANGED)
            return False
        try:
            handle.slot = self._state.tier.reserve(handle.num_bytes)
        except SwapError as error:
            if self._on_full is None:
                raise
            self._on_full(error)
            self._keep(handle, Reason.TIER_FULL)
            return False
        # A reused slot: the D2H stream waits for the last read of it, which may still be in flight.
        self.lane.wait(self._state.fences.event_of(handle.slot.fence))
        return True

    def release(self) -> None:
        """Release the oldest offloaded storages until the bytes that wait are within the budget."""
        running, queue = self._running, self._state.offloading
        if not queue.num_bytes:
            return
        assert running is not None
        allowed_bytes = self._state.release_budget.max_offloading_bytes(running.layer, running.position)
        with_caller: list[Handle] = []  # the layer's caller still holds them
        while queue.num_bytes > allowed_bytes:
            handle = queue.oldest
            changed = handle.changed()
            is_held = not changed and handle.has_external_refs()
            num_layers_since = running.sequence - handle.group.sequence
            if is_held and num_layers_since == 0:
                break  # most likely the layer's own frame refers to it: check again in the next layer
            queue.pop_oldest()
            if is_held and num_layers_since == 1:
                with_caller.append(handle)  # the layer saved its output, which is the next layer's input
            elif changed or is_held:
                self._keep(handle, Reason.CHANGED if changed else Reason.HAS_EXTERNAL_REFS)
            elif not self._state.reacquire(handle):
                with self._state.ranges.storage("release", handle):
                    self._drop(handle)
        if with_caller:
            queue.put_back(with_caller)

    def _drop(self, handle: Handle) -> None:
        """Release a copied storage: its block may be reused once compute has waited for the copy."""
        compute = self._device.current_stream()
        # The compute stream waits for the copy, so that later kernels may reuse the block.
        self._counters.add_stall(self._device.timed_wait(compute, handle.out_event))
        # The block returns to the stream that it was allocated on, which need not be this one: a layer may save a
        # tensor of its main stream on a side stream (shared experts).
        for stream in dict.fromkeys((handle.stream, self._state.main_stream)):
            if stream != compute:
                self._device.wait(stream, handle.out_event)
        handle.move_to(StorageState.OFFLOADED)
        self._decider.record_release(handle.site)
        assert handle.storage is not None
        self._device.discard(handle.storage)
        handle.aliases.clear()
        handle.storage = None
        self._state.ranges.memory()

    def _keep(self, handle: Handle, reason: Reason) -> None:
        """Cancel an offload: the release would free nothing or be wrong, or the tier is full."""
        if self._state.reacquire(handle):
            return  # evicted in the meantime; if it was changed before, backward raises
        handle.move_to(StorageState.KEPT)
        handle.free_slot()
        self._decider.record_kept(handle.site, reason)
        self._counters.layers[handle.site.layer].stayed_bytes += handle.num_bytes
