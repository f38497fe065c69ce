"""Out of memory, turned into a slower step: saved tensors leave the device when an allocation there fails.

The native part (``native/guard.h``) does that on whatever thread the allocation failed, without Python. Here storages
are offered to it, and each is reacquired before it is used, which tells whether it was evicted meanwhile.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.swap.common.types import format_bytes
from megatron.swap.devices.base import Device, Event
from megatron.swap.engine.handle import Handle, StorageState
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.native.guarding import GuardCore, NativeRescue, Piece

GUARD_HOST_FRACTION = 0.25
"""Fraction of host memory that is reserved for a guard which is on for the whole run."""

MAX_NAMED_GROUPS = 4
"""How many groups the line about a rescue names."""

_MICRO_BATCHES = 1 << 32


@dataclass(frozen=True)
class Rescue:
    """What was done for an allocation that had failed.

    Attributes:
        wanted_bytes: size of the allocation.
        freed_bytes: evicted from the device.
        copied_bytes: of these, what had to be copied to the host first.
        held_bytes: on the host, copied for this rescue or earlier ones and not yet reloaded.
        ms: how long it took.
        groups: layer and micro-batch of what was evicted.
    """

    wanted_bytes: int
    freed_bytes: int
    copied_bytes: int
    held_bytes: int
    ms: float
    groups: tuple[tuple[int, int], ...]

    @property
    def short_bytes(self) -> int:
        """How many bytes the device had no room for at that moment."""
        return max(self.freed_bytes, self.held_bytes)

    def __str__(self) -> str:
        whose = ", ".join(f"layer {layer} mb{micro_batch}" for layer, micro_batch in self.groups[:MAX_NAMED_GROUPS])
        if len(self.groups) > MAX_NAMED_GROUPS:  # a large allocation may evict those of a whole model
            whose += f" and {len(self.groups) - MAX_NAMED_GROUPS} more"
        return (
            f"an allocation of {format_bytes(self.wanted_bytes)} failed; {format_bytes(self.freed_bytes)} of saved "
            f"tensors were evicted from the device in {self.ms:.1f} ms, {format_bytes(self.copied_bytes)} of them "
            f"copied to the host ({whose})"
        )


class RescuedBytes:
    """Host memory of the native core that holds an evicted storage's bytes: a slot that ``HostTier`` can read."""

    fence = 0

    def __init__(self, pieces: Sequence[Piece], freed: deque[tuple[int, Sequence[Piece]]]) -> None:
        self._pieces = pieces
        self._freed = freed
        self._views = [
            torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
            for address, num_bytes in pieces
        ]

    def views(self) -> list[torch.Tensor]:
        """One uint8 tensor a piece, valid until ``free``."""
        return self._views

    def free(self, fence: int = 0) -> None:
        """Note that the memory may be reused after read number ``fence``. Safe in finalizers."""
        self._freed.append((fence, self._pieces))


class OomGuard:
    """Offers storages of handles to the native core, which evicts them when an allocation fails, and reacquires them.

    Until ``begin`` it does nothing.

    Args:
        device: where the handles' storages are.
        pool: host memory that the guard may take too, as far as the pool has not reserved it.
        min_bytes: smaller storages that the policy keeps are not offered.
        own_host_bytes: reserved in the budget of ``pool`` for the guard alone.

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
        self._memory = pool.budget.reserve("out-of-memory guard", own_host_bytes) if pool is not None else None
        self._mapped_bytes = 0
        self._core: GuardCore | None = None
        self._offered: dict[int, tuple[weakref.ref[Handle], Event]] = {}
        self._num_offers = 0
        self._num_evictions = 0
        self._freed: deque[tuple[int, Sequence[Piece]]] = deque()

    def begin(self) -> None:
        """Rescue allocations that fail from now on.

        Raises:
            UsageError: there is no native part here, or this process has a guard already.
        """
        if self._core is None:
            self._core = self._device.make_guard()
        self._core.set_most_host_bytes(self._max_host_bytes())
        self._core.begin()
        self._device.leave_free(True)
        self.is_on = True

    def end(self) -> None:
        """Rescue no more. What was offered must still be reacquired before it is used."""
        self.is_on = False
        if self._core is not None:
            self._core.end()
            self._device.leave_free(False)

    def wants(self, num_bytes: int) -> bool:
        """Whether a kept storage of ``num_bytes`` should get a handle and be offered."""
        return self.is_on and num_bytes >= self._min_bytes

    def offer(self, handle: Handle, next_use: int, event: Event, *, is_copied: bool) -> None:
        """Allow the eviction of the storage of ``handle`` until ``reacquire``; while the guard is off do nothing.

        Args:
            next_use: the higher the later; what is used last is evicted first.
            event: passes before the memory may be taken.
            is_copied: the handle's slot has the bytes once ``event`` has passed. Else they are copied to the host
                first.
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
        """Offer what a layer has saved, at the end of its forward: nobody needs it before the layer's backward.

        Storages that others refer to as well are not evicted, and those of another stream are not offered.
        """
        if not self.is_on or not handles:
            return
        compute = self._device.current_stream()
        ready = self._device.record(compute)
        for handle in handles:
            if handle.offer or handle.stream != compute:
                continue  # nothing here says when another stream has finished with it
            if handle.state is StorageState.OFFLOADING:
                self.offer(handle, next_use, handle.out_event, is_copied=True)
            elif handle.state is StorageState.RESIDENT and handle.is_kept_by_decision:
                self.offer(handle, next_use, ready, is_copied=False)

    def reacquire(self, handle: Handle) -> StorageState | None:
        """End the offer of ``handle``: from now on its storage is not evicted.

        Returns:
            The state it had before it was evicted (it is OFFLOADED now); ``None`` if it was not evicted.
        """
        key, handle.offer = handle.offer, 0
        if not key:
            return None
        assert self._core is not None
        pieces = self._core.withdraw(key)
        _, event = self._offered.pop(key)
        if pieces is None:
            return None
        before = handle.state
        handle.move_to(StorageState.OFFLOADED)
        handle.storage = None
        if handle.slot is None:
            handle.slot = RescuedBytes(pieces, self._freed)
        if handle.out_event is None:
            handle.out_event = event
        return before

    def evicted(self) -> list[Handle]:
        """Handles that were evicted since the last call and that nobody has reacquired."""
        num_evictions = 0 if self._core is None else self._core.num_evictions()
        if self._core is None or num_evictions == self._num_evictions:
            return []
        self._num_evictions = num_evictions
        found = [self._offered[key][0]() for key in self._core.take_evicted() if key in self._offered]
        return [handle for handle in found if handle is not None]

    def tidy(self, has_passed: Callable[[int], bool]) -> None:
        """Between layers: release host memory that nobody reads, pin what was mapped, and adapt the limit of both.

        Args:
            has_passed: whether a fence has passed, a number given to ``Slot.free``.
        """
        if self._core is None or self._pool is None:
            return
        while self._freed and has_passed(self._freed[0][0]):
            self._core.release(self._freed.popleft()[1])
        mapped_bytes = self._core.mapped_bytes()
        if mapped_bytes != self._mapped_bytes:
            self._mapped_bytes = mapped_bytes
            self._core.pin()
        self._core.set_most_host_bytes(self._max_host_bytes())

    def take_rescues(self) -> list[Rescue]:
        """The rescues since the last call."""
        return [] if self._core is None else [_rescue(found) for found in self._core.take_rescues()]

    def _max_host_bytes(self) -> int:
        """How much host memory the core may map: what the guard has reserved, and what the pool has not.

        What is mapped beyond ``own_host_bytes`` is reserved first, so that the pool leaves it alone.
        """
        if self._pool is None or self._memory is None:
            return 0
        self._memory.resize(max(self._own_host_bytes, self._mapped_bytes))
        return self._memory.num_bytes + max(0, self._pool.limit_bytes - self._pool.stats.reserved_bytes)


def _rescue(found: NativeRescue) -> Rescue:
    groups = tuple(divmod(group, _MICRO_BATCHES) for group in found.groups)
    return Rescue(found.wanted_bytes, found.freed_bytes, found.copied_bytes, found.held_bytes, found.ms, groups)
