"""Offload: from the moment autograd saves a storage until its device memory is released.

The D2H stream waits for the compute stream, copies, records. The compute stream goes on; it waits for that event only
when the memory is released, a bounded number of bytes later, so that the caching allocator hands the block to work
which is ordered behind the copy. No ``record_stream``, nothing depends on how far the host ran.

Slots are reused in the tier: the D2H stream waits for the read that the slot's fence names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.swap.common.types import MIB, Action, LayerPosition, Site, SwapError
from megatron.swap.engine.checksum import checksum
from megatron.swap.engine.decider import Decider
from megatron.swap.engine.decision import Decision, Reason
from megatron.swap.engine.evict import Evictions
from megatron.swap.engine.handle import Group, Handle, StorageState, alias_of
from megatron.swap.engine.shared_state import SharedState, num_bytes_of

COMMIT_BYTES = 16 * MIB
"""Copies start once this much is pending: from 16 MiB on a PCIe 5 link runs at 99 % of its speed."""


class Running(NamedTuple):
    """The layer whose forward began last. Not its group: that must be freed with its graph."""

    layer: int
    position: LayerPosition
    sequence: int


class Offloader:
    """Copies storages to the tier and releases their device memory.

    Args:
        state: what it shares with reload and eviction.
        evictions: of the out-of-memory guard.
        decider: hears of storages that could not be released.
        verify: take a checksum of every storage.
        on_full: called when the tier has no room for a storage, which is kept then; ``None``: that is an error.

    Attributes:
        stream: the copies' stream.
    """

    def __init__(
        self,
        state: SharedState,
        evictions: Evictions,
        decider: Decider,
        verify: bool,
        on_full: Callable[[SwapError], None] | None,
    ) -> None:
        self.stream = state.device.copy_stream("out")
        self._state = state
        self._device = state.device
        self._counters = state.counters
        self._evictions = evictions
        self._decider = decider
        self._verify = verify
        self._on_full = on_full
        # Storages that are alive on the device, by the address of their StorageImpl. An address alone proves nothing
        # (it is reused); an entry counts only while its handle still has that very storage.
        self._live: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        # Of the layer that runs: handles whose copy is not enqueued yet, and all handles that it has saved.
        self._pending: list[Handle] = []
        self._pending_bytes = 0
        self._saved: list[Handle] = []
        self._running: Running | None = None

    # ------------------------------------------------------------------ saved tensors

    def find(self, storage: torch.UntypedStorage) -> Handle | None:
        """Return the handle of ``storage``, if it was saved before and is on the device since."""
        handle = self._live.get(storage._cdata)
        if handle is None or handle.storage is None or handle.storage._cdata != storage._cdata:
            return None
        return handle

    def begin(self, storage: torch.UntypedStorage, site: Site, group: Group, decision: Decision) -> Handle | None:
        """Return a new handle for ``storage``, which is saved and decided to be kept or offloaded.

        One that is kept has a handle only if the out-of-memory guard may evict it; else ``None`` is returned.
        """
        is_kept = decision.action is Action.KEEP
        if is_kept:
            self.account_kept(storage, group)
            if not self._state.guard.wants(storage.nbytes()):
                return None
        handle = Handle(site, group, storage, self._device.current_stream(), self._state.orphans, decision)
        self._live[storage._cdata] = handle
        if self._verify:
            handle.checksum = checksum(handle.bytes_view())
        if not is_kept:
            self._pending.append(handle)
            self._pending_bytes += handle.num_bytes
        return handle

    def join(self, tensor: torch.Tensor, handle: Handle, group: Group) -> int:
        """Note that ``group`` saves ``tensor``, on the storage of ``handle``. Return its number on the handle.

        Once ``COMMIT_BYTES`` are pending their copies are enqueued, and older storages may be released.
        """
        if handle.is_kept_by_decision:
            self.account_kept(tensor.untyped_storage(), group)
            handle.group = group  # backward comes to this one first
        self._evictions.reacquire(handle)  # an offer counts the owners that there are: from now on there is one more
        self._saved.append(handle)
        if not group.has(handle):
            group.add(handle)
        index = handle.num_packed
        handle.num_packed += 1
        handle.aliases.append(alias_of(tensor))
        if self._pending_bytes >= COMMIT_BYTES:
            self._commit()
            self.release()
        return index

    def account_kept(self, storage: torch.UntypedStorage, group: Group) -> None:
        """Note that the layer that runs keeps ``storage``: copies in flight may not use that much memory any more."""
        if self._state.release_budget.account_kept(storage, group):
            self.release()

    # ------------------------------------------------------------------ a layer's forward

    def discard_unfinished(self) -> None:
        """Forget what a layer has saved whose forward broke off."""
        self._saved.clear()
        self._pending, self._pending_bytes = [], 0

    def begin_forward(self, group: Group) -> None:
        """The layer of ``group`` begins."""
        self._running = Running(group.key.layer, group.position, group.sequence)
        self.release()

    def end_forward(self, group: Group) -> None:
        """The layer of ``group`` has ended: enqueue what is pending, and offer what it saved to the guard."""
        self._commit()
        self._state.guard.offer_all(self._saved, self._state.order.next_use(group))
        self._saved.clear()

    def _commit(self) -> None:
        """Enqueue the copies of everything that is pending."""
        batch, self._pending = self._pending, []
        self._pending_bytes = 0
        going = [handle for handle in batch if self._reserve_slot(handle)]
        if not going:
            return
        state, device = self._state, self._device
        with state.ranges.group("swap_out", going[0].group, num_bytes_of(going)):
            for stream in dict.fromkeys(handle.stream for handle in going):
                device.wait(self.stream, device.record(stream))
            for handle in going:
                assert handle.slot is not None
                with state.ranges.storage("copy_out", handle, handle.num_bytes):
                    num_copies = state.tier.write(device, self.stream, handle.slot, handle.bytes_view())
                handle.move_to(StorageState.OFFLOADING)
                handle.out_event = device.record(self.stream)
                state.offloading.append(handle)
                self._counters.num_out_copies += num_copies
                self._counters.layers[handle.site.layer].out_bytes += handle.num_bytes

    def _reserve_slot(self, handle: Handle) -> bool:
        """Reserve room in the tier for ``handle``. Return False if it is kept instead."""
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
        read = self._state.fences.event_of(handle.slot.fence)
        if read is not None:
            self._device.wait(self.stream, read)
        return True

    def release(self) -> None:
        """Release the oldest storages that were copied until no more wait than the budget allows."""
        running, queue = self._running, self._state.offloading
        assert running is not None
        allowed_bytes = self._state.release_budget.max_offloading_bytes(running.layer, running.position)
        with_caller: list[Handle] = []
        while queue.num_bytes > allowed_bytes:
            handle = queue.oldest
            changed = handle.changed()
            is_held = not changed and handle.has_external_refs()
            num_layers_since = running.sequence - handle.group.sequence
            if is_held and num_layers_since == 0:
                break  # the layer's own frame still has it, most likely: look again in the next layer
            queue.pop_oldest()
            if is_held and num_layers_since == 1:
                with_caller.append(handle)  # a layer saved its output, which is now the next one's input
            elif changed or is_held:
                self._keep(handle, Reason.CHANGED if changed else Reason.HAS_EXTERNAL_REFS)
            elif not self._evictions.reacquire(handle):
                with self._state.ranges.storage("release", handle):
                    self._drop(handle)
        queue.put_back(with_caller)

    def _drop(self, handle: Handle) -> None:
        """Give up a storage that was copied: its block may be reused once compute has waited for the copy."""
        compute = self._device.current_stream()
        self._counters.add_stall(self._device.timed_wait(compute, handle.out_event))
        # The block goes back to the stream that it was allocated on, which need not be this one: a layer may save
        # on a side stream (shared experts) what its main stream has made.
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
        """Keep a storage that was to be offloaded: to release it would free nothing, or be wrong, or has no room."""
        if self._evictions.reacquire(handle):
            return  # it has left in the meantime; where it was changed before, backward says so
        handle.move_to(StorageState.KEPT)
        handle.free_slot()
        self._decider.record_kept(handle.site, reason)
        self._counters.layers[handle.site.layer].stayed_bytes += handle.num_bytes
