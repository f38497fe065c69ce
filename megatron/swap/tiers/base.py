"""The contract between the manager and a place where swapped bytes rest.

Order and lifetime, the same for every tier:

- ``write`` and ``read`` only enqueue on the stream they are given; a disk may let the caller wait, for itself or for a
  buffer that an earlier copy still needs, never for the copy in hand. The manager orders that stream and records the
  event that tells when the bytes have arrived. Both tensors stay alive until then: that is the manager's duty.
- A slot is written once, may be read any number of times, and is freed once. ``free`` may run at any moment, also in
  a finalizer in the middle of another call, so it only notes the fact.
- ``fence`` orders reuse: ``free(fence=n)`` says that read number *n* may still be under way; a slot made of that
  memory shows the highest such number, and the manager lets the writing stream wait for it.
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
        """The last read of this memory's previous owners; 0 if there was none."""
        ...

    def free(self, fence: int = 0) -> None:
        """Give the room back. ``fence``: the last read that was enqueued from it, 0 if none was."""
        ...


@dataclass(frozen=True)
class TierStats:
    """Bytes of a tier: taken from the machine, in slots now, and most in slots so far; the first and the last also of
    the disk behind host memory, if there is one."""

    booked_bytes: int
    leased_bytes: int
    leased_peak_bytes: int
    disk_booked_bytes: int = 0
    disk_peak_bytes: int = 0


class Tier(ABC):
    """A place for swapped storages."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> Slot:
        """Room for ``num_bytes``.

        Raises:
            SwapError: no room is left; the message has the figures and the flags that change them. Nothing else has
                changed then.
        """

    @abstractmethod
    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        """Enqueue the copy of ``source`` (uint8, as long as the slot) into ``slot``; returns in how many pieces."""

    @abstractmethod
    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        """Enqueue the copy of ``slot`` into ``target`` (uint8, as long as the slot); returns in how many pieces."""

    @abstractmethod
    def expect(self, slots: Iterable[Slot]) -> None:
        """These are read next, in this order: a tier that can makes some ready. It takes no more than it needs."""

    @abstractmethod
    def stats(self) -> TierStats:
        """The bytes booked and leased now."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. No copy may be under way."""
