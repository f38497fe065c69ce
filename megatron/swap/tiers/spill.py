"""Host memory, and a disk for what it has no room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from megatron.swap.devices.base import Device, Stream
from megatron.swap.disk_file import DiskFile
from megatron.swap.host_memory import HostMemoryError
from megatron.swap.host_pool import HostPool
from megatron.swap.tiers.base import Slot, Tier, TierStats
from megatron.swap.tiers.disk import DiskSlot, DiskTier
from megatron.swap.tiers.host import HostTier
from megatron.swap.types import MIB

MOST_BUFFER_BYTES = 64 * MIB
"""Of a buffer between device and disk: a few parts of what a disk takes at once."""


def buffer_bytes(host_bytes: int) -> int:
    """Of one of the buffers, which are part of so much host memory."""
    return max(MIB, min(MOST_BUFFER_BYTES, host_bytes // 16))


def spill_tier(pool: HostPool, disk: DiskFile) -> SpillTier:
    """The buffers before the disk are part of what ``pool`` may take."""
    on_disk = DiskTier(disk, buffer_bytes(pool.limit_bytes), pool.pinned)
    pool.limit_bytes -= on_disk.host_bytes
    return SpillTier(HostTier(pool), on_disk)


class SpillTier(Tier):
    """Slots are in ``host``, or on ``disk``.

    When host memory was found short the part that had no room is known. From then on as large a part of each step goes
    to disk, spread over all of it: the disk works while forward and backward last, not only where they meet.
    """

    name = "host and disk"

    def __init__(self, host: Tier, disk: DiskTier) -> None:
        self.disk = disk
        self._host = host
        self._share = 0.0
        self._seen_bytes = self._on_disk_bytes = 0

    def reserve(self, num_bytes: int) -> Slot:
        if not self._host.stats().leased_bytes + self.disk.stats().leased_bytes:  # another step begins
            self._seen_bytes = self._on_disk_bytes = 0
        self._seen_bytes += num_bytes
        if self._on_disk_bytes + num_bytes <= self._share * self._seen_bytes:
            self._on_disk_bytes += num_bytes
            return self.disk.reserve(num_bytes)
        try:
            return self._host.reserve(num_bytes)
        except HostMemoryError:
            slot = self.disk.reserve(num_bytes)
        self._on_disk_bytes += num_bytes
        on_disk_bytes = self.disk.stats().leased_bytes
        self._share = max(self._share, on_disk_bytes / (self._host.stats().leased_bytes + on_disk_bytes))
        return slot

    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        return self._of(slot).write(device, stream, slot, source)

    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        return self._of(slot).read(device, stream, slot, target)

    def expect(self, slots: Iterable[Slot]) -> None:
        self.disk.expect(slot for slot in slots if isinstance(slot, DiskSlot))

    def _of(self, slot: Slot) -> Tier:
        return self.disk if isinstance(slot, DiskSlot) else self._host

    def stats(self) -> TierStats:
        host, disk = self._host.stats(), self.disk.stats()
        return replace(
            host, booked_bytes=host.booked_bytes + self.disk.host_bytes, disk_booked_bytes=disk.booked_bytes,
            disk_peak_bytes=disk.leased_peak_bytes,
        )  # fmt: skip

    def close(self) -> None:
        self._host.close()
        self.disk.close()
