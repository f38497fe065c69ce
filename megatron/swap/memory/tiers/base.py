"""The contract of a tier, a place outside the device that storages are offloaded to.

A tier hands out *slots*, one a storage, and enqueues copies between slots and device memory.

- **Order.** ``write`` and ``read`` enqueue on the given stream, and never wait for their copy. The caller lets that
  stream wait for the work that computes the source, and records an event behind the copy. A slot is written once, read
  any number of times after that, and freed once.
- **Lifetime.** The caller keeps both tensors of a copy until an event behind that copy has passed.
- **Waiting.** A disk may make the calling thread wait for the disk, or for an earlier copy that still uses a buffer.
- **Threads.** One thread at a time calls all methods but ``Slot.free``: training's, or autograd's in backward.
  Any thread and any finalizer may call ``free``, even in the middle of another call. So ``free`` takes no lock and only
  records the slot. The tier's next call reclaims the slot.
- **Fences.** A *fence* is the number of a read that the caller has enqueued. It increases with time; 0 is no read.
  After ``free(fence=n)`` read ``n`` may still be under way. A new slot in that memory has the highest such number as
  its ``fence``. The caller lets the writing stream wait for that read before the write.
- **Evictions.** The out-of-memory guard copies storages to host memory of its own. ``read`` and ``expect`` of a tier
  on host memory take such slots too (``host.HostSlot``).
- **Failure.** ``reserve`` raises a ``SwapError`` if there is no room, and changes nothing. ``reserve``, ``write`` and
  ``read`` raise a ``DiskError`` for a disk failure, also of an earlier operation that they wait for: training ends.
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

    def free(self, fence: int = 0) -> None:
        """Return the room to the tier. ``fence`` is that of the last enqueued read of it; 0 if there was none."""


@dataclass(frozen=True)
class TierStats:
    """Bytes of a tier at one moment."""

    reserved_bytes: int  # host memory or disk taken from the machine
    leased_bytes: int  # in slots now
    leased_peak_bytes: int  # most in slots so far
    disk_reserved_bytes: int = 0  # on the disk behind host memory
    disk_peak_bytes: int = 0  # most in slots on that disk


class Tier(ABC):
    """A place that storages are offloaded to. The module docstring has the rules for every tier."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> Slot:
        """Return a slot for ``num_bytes``, at least 1."""

    @abstractmethod
    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        """Enqueue the copy of ``source`` (uint8, as long as the slot) into ``slot``; return the number of copies."""

    @abstractmethod
    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        """Enqueue the copy of ``slot`` into ``target`` (uint8, as long as the slot); return the number of copies."""

    @abstractmethod
    def expect(self, slots: Iterable[Slot]) -> None:
        """Announce all coming reads in their order. A tier iterates only as far as it reads ahead."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return the bytes reserved and leased now. Freed slots do not count."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, whether slots are freed or not. No copy may be under way."""
