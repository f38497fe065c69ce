"""Host memory, and a disk for what it has no room for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import torch

from megatron.swap.devices.base import Device, Stream
from megatron.swap.disk_file import DiskFile
from megatron.swap.host_memory import HostMemoryError
from megatron.swap.tiers.base import Slot, Tier, TierStats
from megatron.swap.tiers.disk import DiskSlot, DiskTier
from megatron.swap.tiers.host import HostTier
from megatron.swap.types import MIB

MOST_BUFFER_BYTES = 64 * MIB
"""Of a buffer between device and disk: a few parts of what a disk takes at once."""
LOOK_AHEAD = 64
"""Slots among which those on disk are looked for: the walk is made for every layer."""


def buffer_bytes(host_bytes: int) -> int:
    """Of one of the buffers, which are part of so much host memory."""
    return max(MIB, min(MOST_BUFFER_BYTES, host_bytes // 16))


def spill_tier(host: HostTier, disk: DiskFile) -> SpillTier:
    """The buffers before the disk are part of what ``host`` may take."""
    on_disk = DiskTier(disk, buffer_bytes(host.pool.limit_bytes), host.pool.pinned)
    host.pool.limit_bytes -= on_disk.host_bytes
    return SpillTier(host, on_disk)


class SpillTier(Tier):
    """Slots are in ``host``, or on ``disk``.

    A step tells how much of it host memory has no room for. As large a part of the next one goes to disk, spread over
    all of it: the disk works while forward and backward last, not only where they meet.
    """

    def __init__(self, host: HostTier, disk: DiskTier) -> None:
        self.disk = disk
        self._host = host
        self._share = 0.0
        self._seen_bytes = self._on_disk_bytes = self._peak_bytes = 0

    def reserve(self, num_bytes: int) -> Slot:
        live_bytes = self._host.stats().leased_bytes + self.disk.stats().leased_bytes
        if not live_bytes:  # another step begins
            self._share = max(0.0, 1 - self._host.pool.limit_bytes / max(1, self._peak_bytes))
            self._seen_bytes = self._on_disk_bytes = self._peak_bytes = 0
        self._peak_bytes = max(self._peak_bytes, live_bytes + num_bytes)
        self._seen_bytes += num_bytes
        if self._on_disk_bytes + num_bytes > self._share * self._seen_bytes:
            try:
                return self._host.reserve(num_bytes)
            except HostMemoryError:
                pass
        self._on_disk_bytes += num_bytes
        return self.disk.reserve(num_bytes)

    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        return self._of(slot).write(device, stream, slot, source)

    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        return self._of(slot).read(device, stream, slot, target)

    def expect(self, slots: Iterable[Slot]) -> None:
        if self.disk.stats().leased_bytes:
            self.disk.expect(slot for slot in islice(slots, LOOK_AHEAD) if isinstance(slot, DiskSlot))

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
