"""The contract of a tier, a place outside the device that storages are offloaded to.

A tier hands out *slots*, one a storage, and enqueues copies between slots and device memory. The same rules hold for
every tier:

- **Order.** ``write`` and ``read`` only enqueue on the stream that they are given. The caller orders that stream: it
  waits for whoever makes the source, and records the event that says when the bytes have arrived. A slot is written
  once, before its first read; it may be read any number of times; it is freed once.
- **Lifetime.** The caller keeps both tensors of a copy alive until an event recorded behind that copy has passed.
- **Waiting.** No call waits for the copy that it enqueues. A disk may make the calling thread wait for the disk itself,
  or for an earlier copy that still uses a buffer.
- **Threads.** All methods but ``Slot.free`` are called by one thread at a time (training's, or the thread on which
  autograd runs its backward). ``free`` may run at any moment on any thread, also in a finalizer in the middle of
  another call, so it takes no lock and only notes the fact; the tier's next call collects it.
- **Fences.** A *fence* is the number of a read that the caller has enqueued, increasing with time; 0 is none.
  ``free(fence=n)`` says that read ``n`` may still be under way. A slot made of that memory has the highest such number
  as its ``fence``, and the caller lets the writing stream wait for that read before it writes.
- **Failure.** ``reserve`` raises a ``SwapError`` when there is no room, and changes nothing. A disk that fails raises
  ``DiskError`` from ``reserve``, or from the next ``write`` or ``read`` that meets the failed operation: training ends.
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
        """The last read of this memory by its previous owners; 0 if there was none."""
        ...

    def free(self, fence: int = 0) -> None:
        """Return the room to the tier. ``fence``: the last read that was enqueued from it; 0 if none was."""
        ...


@dataclass(frozen=True)
class TierStats:
    """Bytes of a tier at one moment.

    Attributes:
        reserved_bytes: host memory or disk taken from the machine.
        leased_bytes: in slots now.
        leased_peak_bytes: most in slots so far.
        disk_reserved_bytes, disk_peak_bytes: the first and the last of the disk behind host memory, if there is one.
    """

    reserved_bytes: int
    leased_bytes: int
    leased_peak_bytes: int
    disk_reserved_bytes: int = 0
    disk_peak_bytes: int = 0


class Tier(ABC):
    """A place that storages are offloaded to. The module says what holds for every tier."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> Slot:
        """Return a slot for ``num_bytes``, at least 1.

        Raises:
            SwapError: there is no room; the message has the figures and the flags that change them. Nothing else has
                changed then.
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

        It takes no more from ``slots`` than it needs; a caller passes all that is to come.
        """

    @abstractmethod
    def stats(self) -> TierStats:
        """Bytes reserved and leased now; freed slots do not count."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, whether slots are freed or not. No copy may be under way."""
