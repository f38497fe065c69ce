"""The one owner of the copy streams: orders every copy with events, releases device memory, prefetches.

What overlaps what:

- *Swap out*: the D2H stream waits for the compute stream, copies, records. The compute stream goes on; it waits for
  that event only when the memory is released, a bounded number of bytes later, so that the caching allocator hands
  the block to work which is ordered behind the copy. No ``record_stream``, nothing depends on how far the host ran.
- *Swap in*: buffers come from the compute stream's pool, so the H2D stream waits for the compute stream (the block may
  be recycled) and for the storage's own swap out. The compute stream waits when the tensor is asked for.
- *Slots* are reused in the tier: the D2H stream waits for the read that the slot's fence names.

A manager serves one training thread. Autograd's device threads call it too, but only while that thread waits in
``backward``; finalizers run anywhere and touch nothing here but a slot's ``free`` (see ``Handle``).
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable
from itertools import groupby

import torch

from megatron.swap.checksum import checksum
from megatron.swap.devices.base import Device, Stream
from megatron.swap.group import Group
from megatron.swap.guard import OomGuard
from megatron.swap.handle import Handle, Orphans, State, alias_of
from megatron.swap.lending import Lending
from megatron.swap.order import BackwardOrder
from megatron.swap.reads import Reads
from megatron.swap.recording import BRING_BACK
from megatron.swap.tiers.base import Tier
from megatron.swap.trace import Counters, Ranges
from megatron.swap.types import MIB, Action, Place, Site, SwapError

COMMIT_BYTES = 16 * MIB
"""Copies start once this much is pending: from 16 MiB on a PCIe 5 link runs at 99 % of its speed."""

STAYS_BEFORE_GIVING_UP = 2
"""A site whose storage was found in other hands this often is no longer copied out in vain."""


class VerifyError(SwapError):
    """Bytes came back different from what went out."""


class SwapManager:
    """Swaps storages out and in.

    Args:
        device: streams, events and memory.
        tier: where bytes go.
        choose: the policy: KEEP or SWAP the storage (of so many bytes) that was saved at a site.
        window_bytes: most bytes that are brought back ahead of their layer's backward, and most that still wait for
            their release when a forward ends (none, where it ends in the loss); ``None``: as much as the largest group.
        verify: compare checksums of every storage that comes back.
        ranges: where a profiler, if one runs, is told what is being done.
        guard: may take what nobody uses when an allocation fails; ``None``: nobody may.
        on_full: told when the tier has no room for a storage, which stays then; ``None``: that is an error.
    """

    def __init__(
        self,
        device: Device,
        tier: Tier,
        choose: Callable[[Site, int], Action],
        window_bytes: int | None = None,
        verify: bool = False,
        ranges: Ranges | None = None,
        guard: OomGuard | None = None,
        on_full: Callable[[SwapError], None] | None = None,
    ) -> None:
        self.counters = Counters()
        self.ranges = ranges or Ranges()
        self._device = device
        self._tier = tier
        self._choose = choose
        self.lending = Lending(window_bytes)
        self._verify = verify
        self._out_stream = device.copy_stream("out")
        self._in_stream = device.copy_stream("in")
        self._order = BackwardOrder()
        # Storages that are alive on the device, by the address of their StorageImpl. An address alone proves nothing
        # (it is reused); an entry counts only while its handle still holds that very storage.
        self._live: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._pending: list[Handle] = []
        self._pending_bytes = 0
        self._leaving: deque[Handle] = deque()
        self._leaving_bytes = 0
        self._main_stream = device.current_stream()
        self._youngest: Group | None = None
        self._place: Place | None = None
        self._layer: int | None = None
        self._stays: Counter[Site] = Counter()
        self._orphans: Orphans = deque()
        self._reads = Reads(device)
        self._drained = False
        self.guard = guard or OomGuard(device)
        self._on_full = on_full
        self._saved: list[Handle] = []

    # ------------------------------------------------------------------ forward

    def begin_forward(self, layer: int, place: Place) -> Group:
        """A layer starts."""
        self._main_stream = self._device.current_stream()
        self._bury_orphans()
        self._find_evicted()
        self._layer, self._place = layer, place
        self._saved.clear()  # of a layer that broke off
        self._pending, self._pending_bytes = [], 0
        self._youngest = None  # it may be all that keeps a discarded graph's last group waiting
        self._youngest = group = self._order.begin_forward(layer, place)
        if self.ranges.on:
            group.micro_batch = self.ranges.micro_batch(layer)
        self.lending.begin_forward(layer, place)
        self._release()
        return group

    def take(self, tensor: torch.Tensor, site: Site | None, group: Group) -> tuple[Handle, int] | None:
        """Autograd saves ``tensor``: its handle and its number there; ``None``: it stays. No ``site``: none is made."""
        storage = tensor.untyped_storage()
        handle = self._live.get(storage._cdata)
        if handle is None or handle.storage is None or handle.storage._cdata != storage._cdata:
            is_kept = site is None or self._keeps(site, storage.nbytes())
            if is_kept:
                self.claim(storage, group)
            if site is None or (is_kept and not self.guard.wants(storage.nbytes())):
                return None
            handle = Handle(site, group, storage, self._device.current_stream(), self._orphans)
            handle.is_kept = is_kept
            self._live[storage._cdata] = handle
            if self._verify:
                handle.checksum = checksum(handle.bytes_view())
            if not is_kept:
                self._pending.append(handle)
                self._pending_bytes += handle.num_bytes
        elif handle.is_kept:
            self.claim(storage, group)
            handle.group = group  # backward comes to this one first
        self._reclaim(handle)  # what is offered has as many owners as it had then
        self._saved.append(handle)
        if not group.has(handle):
            group.add(handle)
        index = handle.num_packed
        handle.num_packed += 1
        handle.aliases.append(alias_of(tensor))
        if self._pending_bytes >= COMMIT_BYTES:
            self._commit()
            self._release()
        return handle, index

    def claim(self, storage: torch.UntypedStorage, group: Group) -> None:
        """The layer that runs keeps ``storage``: memory that it claims can no longer be lent to copies in flight."""
        if self.lending.claim(storage, group):
            self._release()

    def _keeps(self, site: Site, num_bytes: int) -> bool:
        assert self._place is not None
        return (
            num_bytes == 0
            or self._place.is_tail(self.lending.window_groups)
            or self._choose(site, num_bytes) is Action.KEEP
            or self._stays[site] >= STAYS_BEFORE_GIVING_UP
        )

    def end_forward(self, group: Group) -> None:
        """The layer is through: what is pending goes."""
        self.lending.end_claims()
        self._commit()
        self.guard.offer_all(self._saved, self._order.next_use(group))
        self._saved.clear()
        self.lending.end_forward(group)
        if group.num_bytes:
            self.counters.layers[group.key.layer].num_groups += 1
        self._release()
        self.ranges.memory()
        if group.place.num_after == 0 and not group.place.ends_in_loss:
            self._prefetch()  # a pipeline stage goes on with a backward, or with a forward that gives time for one

    def _commit(self) -> None:
        """Enqueue the copies out of everything pending."""
        batch, self._pending = self._pending, []
        self._pending_bytes = 0
        going: list[Handle] = []
        for handle in batch:
            if handle.state is not State.RESIDENT:
                continue  # backward came first
            if handle.changed():
                self._stay(handle)
                continue
            try:
                handle.slot = self._tier.reserve(handle.num_bytes)
            except SwapError as error:
                if self._on_full is None:
                    raise
                self._on_full(error)
                self._stay(handle, is_refused=False)
                continue
            read = self._reads.event_of(handle.slot.fence)
            if read is not None:
                self._device.wait(self._out_stream, read)
            going.append(handle)
        if not going:
            return
        with self.ranges.group("swap_out", going[0].group, sum(handle.num_bytes for handle in going)):
            for stream in dict.fromkeys(handle.stream for handle in going):
                self._device.wait(self._out_stream, self._device.record(stream))
            for handle in going:
                assert handle.slot is not None
                with self.ranges.storage("copy_out", handle, handle.num_bytes):
                    num_copies = self._tier.write(self._device, self._out_stream, handle.slot, handle.bytes_view())
                handle.move_to(State.LEAVING)
                handle.out_event = self._device.record(self._out_stream)
                self._leaving.append(handle)
                self._leaving_bytes += handle.num_bytes
                self.counters.num_out_copies += num_copies
                self.counters.layers[handle.site.layer].out_bytes += handle.num_bytes

    def _release(self) -> None:
        """Drop the oldest storages that were copied out until no more is left than memory is lent."""
        assert self._place is not None
        assert self._layer is not None
        allowed_bytes = self.lending.leaving_bytes(self._layer, self._place)
        assert self._youngest is not None
        with_caller: list[Handle] = []
        while self._leaving_bytes > allowed_bytes:
            handle = self._leaving[0]
            gone_wrong = handle.changed()
            held = gone_wrong or handle.held_elsewhere()
            num_since = self._youngest.sequence - handle.group.sequence
            if held and not gone_wrong and num_since == 0:
                break  # the layer's own frame still holds it, most likely: look again in the next layer
            self._leaving.popleft()
            self._leaving_bytes -= handle.num_bytes
            if held and not gone_wrong and num_since == 1:
                with_caller.append(handle)  # a layer saved its output, which is now the next one's input
            elif held:
                self._stay(handle)
            elif not self._reclaim(handle):
                with self.ranges.storage("release", handle):
                    self._drop(handle)
        self._leaving.extendleft(reversed(with_caller))
        self._leaving_bytes += sum(handle.num_bytes for handle in with_caller)

    def _drop(self, handle: Handle) -> None:
        """Let go of a storage that was copied out: its memory is for everybody once compute has waited for the copy."""
        compute = self._device.current_stream()
        self.counters.add_stall(self._device.timed_wait(compute, handle.out_event))
        # The block goes back to the stream that it was allocated on, which need not be this one: a layer may save
        # on a side stream (shared experts) what its main stream has made.
        for stream in dict.fromkeys((handle.stream, self._main_stream)):
            if stream != compute:
                self._device.wait(stream, handle.out_event)
        handle.move_to(State.OUT)
        self._stays.pop(handle.site, None)  # only refusals in a row count
        assert handle.storage is not None
        self._device.discard(handle.storage)
        handle.aliases.clear()
        handle.storage = None
        self.ranges.memory()

    def _stay(self, handle: Handle, *, is_refused: bool = True) -> None:
        """Others hold the storage, or wrote to it: dropping our reference would free nothing, or be wrong.
        ``is_refused``: so it will be the next time; else there was just no room."""
        if self._reclaim(handle):
            return  # it has left in the meantime; where it was changed before, backward says so
        handle.move_to(State.STAYS)
        handle.free_slot()
        self._stays[handle.site] += is_refused
        self.counters.layers[handle.site.layer].stayed_bytes += handle.num_bytes

    # ----------------------------------------------------------------- backward

    def begin_backward(self, group: Group) -> None:
        """The backward of ``group`` starts: the rest of it comes in, and what follows is prefetched. Idempotent."""
        if not self._order.begin_backward(group):
            return
        self.ranges.backward(group)
        self._bury_orphans()
        self._find_evicted()
        group.ahead_bytes = 0
        late = [handle for handle in group.in_backward_order() if self._claim(handle) is State.OUT]
        self.counters.num_late += len(late)
        self._bring_back(late, "swap_in")
        self._prefetch()

    def fetch(self, handle: Handle, group: Group, index: int) -> torch.UntypedStorage:
        """Autograd asks saved tensor number ``index`` of ``handle`` back: the storage that holds its bytes.

        Raises:
            RuntimeError: the tensor was changed in place after autograd saved it.
            VerifyError: with ``verify``, the bytes are not those that were saved.
        """
        self.begin_backward(group)
        if handle.aliases:
            handle.aliases[index].check(str(handle.site))
        compute = self._device.current_stream()
        if self._claim(handle) is State.OUT:
            self.counters.num_late += 1
            self._bring_back([handle], "swap_in")
        if handle.state is State.RETURNING:
            with self.ranges.storage("wait", handle):
                self.counters.add_stall(self._device.timed_wait(compute, handle.in_event))
            handle.move_to(State.BACK)
            self._check(handle)
        elif handle.state is State.STAYS and handle.out_event is not None:
            # A copy out that backward overtook still reads this memory, which dies soon after.
            with self.ranges.storage("wait", handle):
                self.counters.add_stall(self._device.timed_wait(compute, handle.out_event))
            handle.out_event = None
        elif handle.state is State.BACK:
            # Another stream may have been the one that waited first. Free once the event has passed.
            self._device.wait(compute, handle.in_event)
        storage = handle.storage
        assert storage is not None
        if handle.state is State.BACK:
            if compute != handle.stream:
                self._device.used_on(storage, compute)
            handle.num_unpacked += 1
            if handle.num_unpacked == handle.num_packed:
                # The last tensor on it was asked for: from here on its user alone keeps it, as in plain autograd.
                # The slot stays: a second backward over a retained graph would bring it in again.
                handle.storage = None
                handle.num_unpacked = 0
                handle.move_to(State.OUT)
                self._prefetch()
        return storage

    def _claim(self, handle: Handle) -> State:
        """Backward wants ``handle`` soon: if it has not left the device yet, it does not leave at all."""
        self._reclaim(handle)
        if handle.state is State.LEAVING:
            self._leaves_not(handle)
            handle.move_to(State.STAYS)
            handle.free_slot()  # later writes into it are on the same stream, behind this copy
        elif handle.state is State.RESIDENT:
            handle.move_to(State.STAYS)
        return handle.state

    def _leaves_not(self, handle: Handle) -> None:
        """It waits no longer to be dropped, if it did: after ``drain`` nothing does."""
        if handle in self._leaving:
            self._leaving.remove(handle)
            self._leaving_bytes -= handle.num_bytes

    def _bring_back(self, handles: list[Handle], why: str = "prefetch") -> None:
        """Enqueue the copies in, in the order given. Where memory is short what is prefetched comes later.

        Raises:
            SwapError: the manager was drained before.
        """
        if not handles:
            return
        if self._drained:
            raise SwapError(
                f"{handles[0].label}: swapping was closed while this tensor was in host memory, so backward cannot "
                "have it any more. Close after the last backward."
            )
        compute = self._device.current_stream()
        with self.ranges.mark(f"{BRING_BACK} {len(handles)}"):
            coming_slots = deque(handle.slot for handle in handles if handle.slot is not None)
            self._tier.expect(coming_slots)
            buffers = self._device.allocate_all([handle.num_bytes for handle in handles], is_ahead=why == "prefetch")
            for handle in handles[len(buffers) :]:
                handle.group.ahead_bytes -= handle.num_bytes
                handle.group.came_in_vain = True
            self._device.wait(self._in_stream, self._device.record(compute))
            for group, coming in groupby(zip(handles, buffers, strict=False), key=lambda pair: pair[0].group):
                pairs = list(coming)
                with self.ranges.group(why, group, sum(handle.num_bytes for handle, _ in pairs)):
                    for handle, buffer in pairs:
                        coming_slots.popleft()
                        self._read(handle, buffer, compute)
                        if why == "prefetch":  # else it is used now, whatever other groups it is in
                            self.guard.offer(handle, self._order.next_use(group), handle.in_event, is_copied=True)
                        self._tier.expect(coming_slots)
        self.ranges.memory()

    def _read(self, handle: Handle, buffer: torch.Tensor, compute: Stream) -> None:
        assert handle.slot is not None
        self._device.wait(self._in_stream, handle.out_event)
        with self.ranges.storage("copy_in", handle, handle.num_bytes):
            num_copies = self._tier.read(self._device, self._in_stream, handle.slot, buffer)
        handle.move_to(State.RETURNING)
        handle.in_event = self._device.record(self._in_stream)
        handle.storage = buffer.untyped_storage()
        self.ranges.arrived(handle, handle.storage)
        handle.stream = compute
        handle.in_fence = self._reads.add(handle.in_event)
        self.counters.num_in_copies += num_copies
        self.counters.layers[handle.site.layer].in_bytes += handle.num_bytes

    def _prefetch(self) -> None:
        """Bring back what backward needs next, in its order, as far as memory is allowed to it."""
        ahead_bytes = self._order.ahead_bytes()
        num_kept_between = kept_between_bytes = 0
        coming: list[Handle] = []
        for group in self._order.upcoming():
            if group.came_in_vain:
                break
            if not group.num_bytes:
                num_kept_between += 1
                kept_between_bytes += group.kept_bytes
                continue
            allowed_bytes = self.lending.ahead_bytes(group, self._order.current, num_kept_between, kept_between_bytes)
            kept_between_bytes += group.kept_bytes
            for handle in group.in_backward_order():
                if handle.state not in (State.OUT, State.LEAVING) or handle in coming:
                    continue
                # A window smaller than a storage still lets one through.
                if ahead_bytes + handle.num_bytes > allowed_bytes and (ahead_bytes or not allowed_bytes):
                    self._bring_back(coming)
                    self._expect()
                    return
                ahead_bytes += handle.num_bytes
                group.ahead_bytes += handle.num_bytes
                if self._claim(handle) is State.OUT:
                    coming.append(handle)
        self._bring_back(coming)
        self._expect()

    def _expect(self) -> None:
        """Tell the tier what comes after that."""
        self._tier.expect(
            handle.slot
            for group in self._order.upcoming()
            for handle in group.in_backward_order()
            if handle.state is State.OUT and handle.slot is not None
        )

    def _check(self, handle: Handle) -> None:
        if handle.checksum is not None and not torch.equal(checksum(handle.bytes_view()), handle.checksum):
            raise VerifyError(
                f"--swap-verify: {handle.site} ({handle.num_bytes} bytes) came back different from what autograd "
                "saved. Either something wrote to the tensor after it was saved, or a copy went wrong. Please report "
                "this with the model's flags; until then exclude the layer or module from --swap-layers/--swap-modules."
            )

    # ---------------------------------------------------------- when memory is short

    def _reclaim(self, handle: Handle) -> bool:
        """From now on the guard does not take its memory; whether it had."""
        before = self.guard.claim(handle)
        if before is State.LEAVING:
            self._leaves_not(handle)
        elif before is State.RETURNING:
            handle.group.ahead_bytes -= handle.num_bytes
            handle.group.came_in_vain = True
        elif before is State.RESIDENT:
            handle.group.num_bytes += handle.num_bytes
            self.lending.see(handle.group)
            handle.group.kept_bytes -= handle.num_bytes
            self.counters.layers[handle.site.layer].out_bytes += handle.num_bytes
        return before is not None

    def _find_evicted(self) -> None:
        """Note what the guard has taken since, so that it is brought back in time."""
        for handle in self.guard.evicted():
            self._reclaim(handle)
        self.guard.tidy(self._reads.have_passed)

    # ------------------------------------------------------------------ the rest

    def follow(self, window_bytes: int | None) -> None:
        """Another policy holds from the next forward on, with its window: what was learned of sizes is no longer true.

        Between steps: no group may be on its way.
        """
        self.lending.follow(window_bytes)
        self._stays.clear()

    def _bury_orphans(self) -> None:
        """Free storages whose handles died during a copy (a prefetched tensor that no gradient needed, say)."""
        while self._orphans:
            storage, event = self._orphans.popleft()
            for stream in dict.fromkeys((self._device.current_stream(), self._main_stream)):
                self._device.wait(stream, event)
            del storage  # from here on its block may be reused: everything later is ordered behind the copy

    def drain(self) -> None:
        """Training is over, or broke off: wait for every copy, then forget what was on its way.

        A graph that is there still has what is on the device; it gets nothing back that is not.
        """
        self._drained = True
        self.guard.end()
        self._device.close()
        self._pending, self._pending_bytes = [], 0
        self._leaving.clear()
        self._leaving_bytes = 0
        self._reads.clear()
        self._orphans.clear()
