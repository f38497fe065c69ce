"""Out of memory, turned into a slower step: saved tensors leave the device when an allocation there fails.

The native part (``native/guard.h``) does that on whatever thread the allocation failed, without Python. Here storages
are offered to it and claimed back, each before it is used; whoever claims one finds out whether it is still there.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.swap.devices.base import Device, Event
from megatron.swap.handle import Handle, State
from megatron.swap.host_pool import HostPool
from megatron.swap.native.guarding import GuardCore, NativeRescue, Piece
from megatron.swap.types import format_bytes

PART_OF_HOST = 0.25
"""Of host memory, for a guard that is on for good: activations that swap never get it."""

MOST_NAMED = 4
"""Of a rescue's groups, in its line."""

_MICRO_BATCHES = 1 << 32


@dataclass(frozen=True)
class Rescue:
    """What was done for an allocation that had failed.

    Attributes:
        wanted_bytes: of the allocation.
        freed_bytes, copied_bytes: taken from the device; of that, what had to be copied to the host first.
        held_bytes: copied for this one and for others before, and not back yet.
        groups: layer and micro-batch of what was taken.
    """

    wanted_bytes: int
    freed_bytes: int
    copied_bytes: int
    held_bytes: int
    ms: float
    groups: tuple[tuple[int, int], ...]

    @property
    def short_bytes(self) -> int:
        """What the device had no room for at that moment."""
        return max(self.freed_bytes, self.held_bytes)

    def __str__(self) -> str:
        whose = ", ".join(f"layer {layer} mb{micro_batch}" for layer, micro_batch in self.groups[:MOST_NAMED])
        if len(self.groups) > MOST_NAMED:  # a large allocation takes those of a whole model
            whose += f" and {len(self.groups) - MOST_NAMED} more"
        return (
            f"an allocation of {format_bytes(self.wanted_bytes)} failed; {format_bytes(self.freed_bytes)} of saved "
            f"tensors were taken from the device in {self.ms:.1f} ms, {format_bytes(self.copied_bytes)} of them copied "
            f"to the host ({whose})"
        )


class RescuedBytes:
    """Host memory of the native part that holds a storage's bytes: a slot that host memory's tier can read."""

    fence = 0

    def __init__(self, pieces: Sequence[Piece], freed: deque[tuple[int, Sequence[Piece]]]) -> None:
        self._pieces = pieces
        self._freed = freed
        self._views = [
            torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
            for address, num_bytes in pieces
        ]

    def views(self) -> list[torch.Tensor]:
        """One uint8 tensor a piece. They are there until ``free``, as whoever enqueues a copy expects."""
        return self._views

    def free(self, fence: int = 0) -> None:
        """May run in a finalizer: it only notes."""
        self._freed.append((fence, self._pieces))


class OomGuard:
    """Offers storages of handles, and claims them back. Until ``begin`` it does nothing.

    Args:
        device: where the handles' storages are.
        pool: what this takes of host memory is not the pool's any more.
        min_bytes: of what is kept, that is smaller and stays.
        own_host_bytes: host memory beside the pool's; of that it takes what is not booked.

    Attributes:
        is_on: allocations that fail are rescued.
    """

    def __init__(
        self, device: Device, pool: HostPool | None = None, min_bytes: int = 0, own_host_bytes: int = 0
    ) -> None:
        self.is_on = False
        self._device = device
        self._pool = pool
        self._min_bytes = min_bytes
        self._own_host_bytes = own_host_bytes
        self._of_pool_bytes = self._mapped_bytes = 0
        self._core: GuardCore | None = None
        self._offered: dict[int, tuple[weakref.ref[Handle], Event]] = {}
        self._num_offers = 0
        self._num_evictions = 0
        self._freed: deque[tuple[int, Sequence[Piece]]] = deque()

    def begin(self) -> None:
        """From now on allocations that fail are rescued.

        Raises:
            UsageError: there is no native part here.
        """
        if self._core is None:
            self._core = self._device.make_guard()
        self._core.set_most_host_bytes(self._room_bytes())
        self._core.begin()
        self._device.leave_free(True)
        self.is_on = True

    def end(self) -> None:
        """No longer. What was offered may still be claimed, and must be before it is used."""
        self.is_on = False
        if self._core is not None:
            self._core.end()
            self._device.leave_free(False)

    def wants(self, num_bytes: int) -> bool:
        """Whether something kept, of that size, is to have a handle, and to be offered."""
        return self.is_on and num_bytes >= self._min_bytes

    def offer(self, handle: Handle, next_use: int, event: Event, *, is_copied: bool) -> None:
        """Until it is claimed the memory of ``handle`` may be taken, once ``event`` has passed.

        Args:
            next_use: the higher the later.
            is_copied: its slot has its bytes then. Else they are copied to the host first.
        """
        if not self.is_on:
            return
        assert self._core is not None
        assert handle.storage is not None
        self._num_offers = key = self._num_offers + 1
        handle.guard, handle.offer = self, key
        self._offered[key] = weakref.ref(handle), event  # which keeps the event alive
        self._core.offer(
            key, handle.storage._cdata, handle.num_bytes, handle.num_owners, next_use, is_copied,
            self._device.native_event(event), handle.group.key.layer * _MICRO_BATCHES + handle.group.micro_batch,
        )  # fmt: skip

    def offer_all(self, handles: Sequence[Handle], next_use: int) -> None:
        """A layer is through: what it has saved nobody needs before its backward, unless others hold it as well."""
        if not self.is_on or not handles:
            return
        compute = self._device.current_stream()
        ready = self._device.record(compute)
        for handle in handles:
            if handle.offer or handle.stream != compute:
                continue  # who knows when another stream is through with it
            if handle.state is State.LEAVING:
                self.offer(handle, next_use, handle.out_event, is_copied=True)
            elif handle.state is State.RESIDENT and handle.is_kept:
                self.offer(handle, next_use, ready, is_copied=False)

    def claim(self, handle: Handle) -> State | None:
        """From now on the memory of ``handle`` is not taken. Where it was: the handle is OUT; the state that it had."""
        key, handle.offer = handle.offer, 0
        if not key:
            return None
        assert self._core is not None
        pieces = self._core.claim(key)
        _, event = self._offered.pop(key)
        if pieces is None:
            return None
        before = handle.state
        handle.move_to(State.OUT)
        handle.storage = None
        if handle.slot is None:
            handle.slot = RescuedBytes(pieces, self._freed)
        if handle.out_event is None:
            handle.out_event = event
        return before

    def evicted(self) -> list[Handle]:
        """Handles whose memory was taken and that nobody has claimed since the last call."""
        num_evictions = 0 if self._core is None else self._core.num_evictions()
        if self._core is None or num_evictions == self._num_evictions:
            return []
        self._num_evictions = num_evictions
        found = [self._offered[key][0]() for key in self._core.take_evicted() if key in self._offered]
        return [handle for handle in found if handle is not None]

    def tidy(self, has_passed: Callable[[int], bool]) -> None:
        """Between layers: make what was taken of host memory fast to copy, and lend again what nobody reads.

        Args:
            has_passed: whether that fence has, a number given to ``Slot.free``.
        """
        if self._core is None or self._pool is None:
            return
        while self._freed and has_passed(self._freed[0][0]):
            self._core.give_back(self._freed.popleft()[1])
        mapped_bytes = self._core.mapped_bytes()
        if mapped_bytes != self._mapped_bytes:
            self._mapped_bytes = mapped_bytes
            self._core.pin()
        self._core.set_most_host_bytes(self._room_bytes())

    def take_rescues(self) -> list[Rescue]:
        """Those since the last call."""
        return [] if self._core is None else [_rescue(found) for found in self._core.take_rescues()]

    def _room_bytes(self) -> int:
        """How much host memory this may take: its own, and what the pool has not booked."""
        if self._pool is None:
            return self._own_host_bytes
        of_pool_bytes = max(0, self._mapped_bytes - self._own_host_bytes)
        self._pool.limit_bytes -= of_pool_bytes - self._of_pool_bytes
        self._of_pool_bytes = of_pool_bytes
        return self._own_host_bytes + of_pool_bytes + max(0, self._pool.limit_bytes - self._pool.stats.booked_bytes)


def _rescue(found: NativeRescue) -> Rescue:
    groups = tuple(divmod(group, _MICRO_BATCHES) for group in found.groups)
    return Rescue(found.wanted_bytes, found.freed_bytes, found.copied_bytes, found.held_bytes, found.ms, groups)
