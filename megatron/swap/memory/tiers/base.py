"""The contract of a tier, a place outside the device that storages are offloaded to.

A tier hands out *slots*, one a storage, and enqueues copies between slots and device memory. The same rules hold for
every tier:

- **Order.** ``write`` and ``read`` only enqueue on the stream that they are given. The caller orders that stream: it
  lets the stream wait for the work that computes the source, and records an event behind the copy. A slot is written
  once, before its first read; it may be read any number of times; it is freed once.
- **Lifetime.** The caller keeps both tensors of a copy alive until an event recorded behind that copy has passed.
- **Waiting.** No call waits for the copy that it enqueues. A disk may make the calling thread wait for the disk itself,
  or for an earlier copy that still uses a buffer.
- **Threads.** All methods but ``Slot.free`` are called by one thread at a time (training's, or the thread on which
  autograd runs its backward). ``free`` may run at any moment on any thread, also in a finalizer in the middle of
  another call, so it takes no lock and only records the slot; the tier's next call reclaims it.
- **Fences.** A *fence* is the number of a read that the caller has enqueued, increasing with time; 0 is none.
  After ``free(fence=n)`` read ``n`` may still be under way. A new slot in that memory has the highest such number as
  its ``fence``, and the caller lets the writing stream wait for that read before it writes.
- **Evictions.** The out-of-memory guard copies a storage to host memory of its own. ``read`` and ``expect`` of a tier
  on host memory may get that slot (``host.HostSlot``), though the tier did not hand it out.
- **Failure.** ``reserve`` raises a ``SwapError`` when there is no room, and changes nothing. A disk failure is
  raised as ``DiskError`` by ``reserve``, or by the next ``write`` or ``read`` that waits for the failed operation:
  training ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron.swap.devices.base import Device, Stream


class Slot(Protocol):
    """Room for one storage in a tier."""

    @property
    def fence(self) -> int:
        """The fence of the last read by previous owners of this memory; 0 if there was none."""
        ...

    def free(self, fence: int = 0) -> None:
        """Return the room to the tier. ``fence``: that of the last read that was enqueued from it; 0 if none was."""
        ...


@dataclass(frozen=True)
class TierStats:
    """Bytes of a tier at one moment.

    Attributes:
        reserved_bytes: host memory or disk taken from the machine.
        leased_bytes: in slots now.
        leased_peak_bytes: most in slots so far.
        disk_reserved_bytes, disk_peak_bytes: reserved, and most in slots, on the disk behind host memory.
    """

    reserved_bytes: int
    leased_bytes: int
    leased_peak_bytes: int
    disk_reserved_bytes: int = 0
    disk_peak_bytes: int = 0


class Tier(ABC):
    """A place that storages are offloaded to. The module docstring has the rules for every tier."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> Slot:
        """Return a slot for ``num_bytes``, at least 1.

        Raises:
            SwapError: there is no room; nothing has changed. The message has the figures and the flags to change.
        """

    @abstractmethod
    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        """Enqueue the copy of ``source`` (uint8, as long as the slot) into ``slot``; returns the number of copies.

        Raises:
            DiskError: a disk has failed.
        """

    @abstractmethod
    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        """Enqueue the copy of ``slot`` into ``target`` (uint8, as long as the slot); returns the number of copies.

        Raises:
            DiskError: a disk has failed.
        """

    @abstractmethod
    def expect(self, slots: Iterable[Slot]) -> None:
        """Announce the next reads, in their order, so that a disk can begin some of them.

        The caller passes all coming reads; the tier iterates only as far as it needs.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Bytes reserved and leased now; freed slots do not count."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, whether slots are freed or not. No copy may be under way."""
