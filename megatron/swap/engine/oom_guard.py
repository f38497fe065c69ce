"""Eviction of saved tensors when a device allocation fails: a slower step instead of an out-of-memory error.

The native part (``native/guard.h``) evicts on the thread whose allocation failed, without Python. This module offers
storages to it. Each storage is reacquired before its use, which shows whether it was evicted since.
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
from megatron.swap.native.guarding import GuardCore, Piece

GUARD_HOST_FRACTION = 0.25  # of host memory: reserved for a guard that is on for the whole run

MAX_NAMED_GROUPS = 4  # in the log line of a rescue

_MICRO_BATCHES = 1 << 32


@dataclass(frozen=True)
class Rescue:
    """The evictions for one allocation that had failed."""

    wanted_bytes: int  # of the allocation
    freed_bytes: int  # evicted from the device
    copied_bytes: int  # the part of `freed_bytes` that had to be copied to the host first
    held_bytes: int  # on the host, copied for this or earlier rescues and not yet reloaded
    ms: float
    groups: tuple[tuple[int, int], ...]  # (layer, micro-batch) of each evicted group

    @property
    def short_bytes(self) -> int:
        """Bytes that the device had no room for at that moment."""
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
    """Slot of an evicted storage, in the native core's host memory; ``HostTier`` can read it."""

    fence = 0

    def __init__(self, pieces: Sequence[Piece], freed: deque[tuple[int, Sequence[Piece]]]) -> None:
        self._pieces = pieces
        self._freed = freed
        self._views = [
            torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
            for address, num_bytes in pieces
        ]

    def views(self) -> list[torch.Tensor]:
        """Return one uint8 tensor for each piece, valid until ``free``."""
        return self._views

    def free(self, fence: int = 0) -> None:
        """Allow the memory to be reused after read number ``fence``. Safe in finalizers."""
        self._freed.append((fence, self._pieces))


class OomGuard:
    """Offers storages to the native core, which evicts them when an allocation fails. Does nothing until ``begin``.

    Kept storages below ``min_bytes`` are not offered. ``own_host_bytes`` are reserved in the budget of ``pool``; the
    guard also uses host memory within the pool's limit that the pool has not reserved.
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
        self._rescues: list[Rescue] = []  # that nobody has taken
        self._num_rescues = self._rescued_bytes = 0

    def begin(self) -> None:
        """Start rescuing allocations, or raise a ``UsageError``: no native part, or a guard is at work already."""
        if self._core is None:
            self._core = self._device.make_guard()
        self._core.set_most_host_bytes(self._max_host_bytes())
        self._core.begin()
        self._device.leave_free(True)
        self.is_on = True

    def end(self) -> None:
        """Stop rescuing. Offered storages must still be reacquired before their use."""
        self.is_on = False
        if self._core is not None:
            self._core.end()
            self._device.leave_free(False)

    def wants(self, num_bytes: int) -> bool:
        """Whether a kept storage of ``num_bytes`` should get a handle and be offered."""
        return self.is_on and num_bytes >= max(1, self._min_bytes)

    def offer(self, handle: Handle, next_use: int, event: Event, *, is_copied: bool) -> None:
        """Allow eviction of the storage of ``handle`` until ``reacquire``. Do nothing while the guard is off.

        The storage with the highest ``next_use`` is evicted first. ``event`` passes before the memory may be taken. If
        ``is_copied``, the handle's slot has the bytes from then on; otherwise the eviction copies them to the host.
        """
        if not self.is_on or self._core is None:
            return
        assert handle.storage is not None
        self._num_offers = key = self._num_offers + 1
        handle.guard, handle.offer = self, key
        self._offered[key] = weakref.ref(handle), event  # which keeps the event alive
        self._core.offer(
            key, handle.storage._cdata, handle.num_bytes, handle.num_owners, next_use, is_copied,
            self._device.native_event(event), handle.group.key.layer * _MICRO_BATCHES + handle.group.micro_batch,
        )  # fmt: skip

    def offer_all(self, handles: Sequence[Handle], next_use: int) -> None:
        """Offer a layer's saved storages at the end of its forward: their next use is in the layer's backward."""
        if not self.is_on or not handles:
            return
        compute = self._device.current_stream()
        ready = self._device.record(compute)
        for handle in handles:
            # The core leaves storages with external references where they are.
            if handle.offer or handle.stream != compute:
                continue  # no event shows when another stream has finished with it
            if handle.state is StorageState.OFFLOADING:
                self.offer(handle, next_use, handle.out_event, is_copied=True)
            elif handle.state is StorageState.RESIDENT and handle.is_kept_by_decision:
                self.offer(handle, next_use, ready, is_copied=False)

    def reacquire(self, handle: Handle) -> StorageState | None:
        """Protect the storage of ``handle`` from eviction. Return its state before its eviction, or None."""
        key, handle.offer = handle.offer, 0
        if not key or self._core is None:
            return None
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
        """Return handles that were evicted since the last call and not reacquired."""
        num_evictions = 0 if self._core is None else self._core.num_evictions()
        if self._core is None or num_evictions == self._num_evictions:
            return []
        self._num_evictions = num_evictions
        found = [self._offered[key][0]() for key in self._core.take_evicted() if key in self._offered]
        return [handle for handle in found if handle is not None]

    def tidy(self, has_passed: Callable[[int], bool]) -> None:
        """Free unused host memory, pin new memory, and set the limit, between layers. ``has_passed`` takes a fence."""
        if self._core is None or self._pool is None:
            return
        while self._freed and has_passed(self._freed[0][0]):
            self._core.release(self._freed.popleft()[1])
        mapped_bytes = self._core.mapped_bytes()
        if mapped_bytes != self._mapped_bytes:
            self._mapped_bytes = mapped_bytes
            self._core.pin()
        self._core.set_most_host_bytes(self._max_host_bytes())

    @property
    def host_bytes(self) -> int:
        """Host memory of evicted storages, in bytes, in use or not."""
        return 0 if self._core is None else self._core.mapped_bytes()

    def take_rescues(self) -> list[Rescue]:
        """Return the rescues since the last call."""
        self._note_rescues()
        taken, self._rescues = self._rescues, []
        return taken

    def total_rescues(self) -> tuple[int, int]:
        """Return the number of all rescues, and the bytes that were evicted for them."""
        self._note_rescues()
        return self._num_rescues, self._rescued_bytes

    def _note_rescues(self) -> None:
        found = [] if self._core is None else [
            Rescue(
                one.wanted_bytes, one.freed_bytes, one.copied_bytes, one.held_bytes, one.ms,
                tuple(divmod(group, _MICRO_BATCHES) for group in one.groups),
            )
            for one in self._core.take_rescues()
        ]  # fmt: skip
        self._rescues += found
        self._num_rescues += len(found)
        self._rescued_bytes += sum(one.freed_bytes for one in found)

    def _max_host_bytes(self) -> int:
        """Return the host bytes that the core may map: the guard's reservation, and the pool's unreserved rest."""
        if self._pool is None or self._memory is None:
            return 0
        # Reserve memory mapped beyond `own_host_bytes` first, so that the pool does not use it.
        self._memory.resize(max(self._own_host_bytes, self._mapped_bytes))
        return self._memory.num_bytes + max(0, self._pool.limit_bytes - self._pool.stats.reserved_bytes)
