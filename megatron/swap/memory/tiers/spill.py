"""The tier of host memory with a disk behind it, for the storages that do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

import torch

from megatron.swap.common.disk_buffers import staging_bytes
from megatron.swap.devices.base import Device, Stream
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_memory import HostMemoryError
from megatron.swap.memory.tiers.base import Slot, Tier, TierStats
from megatron.swap.memory.tiers.disk import DiskSlot, DiskTier
from megatron.swap.memory.tiers.host import HostTier

LOOK_AHEAD = 64  # next slots that are searched for slots on disk; the search runs once a layer


def spill_tier(host: HostTier, disk: DiskFile, buffer_bytes: int) -> SpillTier:
    """Put ``disk`` behind ``host``, with buffers that the budget reserves, or raise a ``HostMemoryError``."""
    host.pool.budget.reserve("disk buffers", staging_bytes(buffer_bytes))
    return SpillTier(host, DiskTier(disk, buffer_bytes, host.pool.pinned))


class SpillTier(Tier):
    """A tier whose slots are in ``host`` or on ``disk``."""

    def __init__(self, host: HostTier, disk: DiskTier) -> None:
        self.disk = disk
        self._host = host
        self._disk_fraction = 0.0
        self._seen_bytes = self._on_disk_bytes = self._peak_bytes = 0

    def reserve(self, num_bytes: int) -> Slot:
        live_bytes = self._host.stats().leased_bytes + self.disk.stats().leased_bytes
        if not live_bytes:  # a step begins
            # Send to disk the fraction that did not fit host memory in the last step, spread evenly. So the disk works
            # during all of forward and backward, not only around the turning point.
            self._disk_fraction = max(0.0, 1 - self._host.pool.limit_bytes / max(1, self._peak_bytes))
            self._seen_bytes = self._on_disk_bytes = self._peak_bytes = 0
        self._peak_bytes = max(self._peak_bytes, live_bytes + num_bytes)
        self._seen_bytes += num_bytes
        if self._on_disk_bytes + num_bytes > self._disk_fraction * self._seen_bytes:
            try:
                return self._host.reserve(num_bytes)
            except HostMemoryError:
                pass
        self._on_disk_bytes += num_bytes
        return self.disk.reserve(num_bytes)

    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        return self._tier_of(slot).write(device, stream, slot, source)

    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        return self._tier_of(slot).read(device, stream, slot, target)

    def expect(self, slots: Iterable[Slot]) -> None:
        if self.disk.stats().leased_bytes:
            self.disk.expect(slot for slot in islice(slots, LOOK_AHEAD) if isinstance(slot, DiskSlot))

    def _tier_of(self, slot: Slot) -> Tier:
        return self.disk if isinstance(slot, DiskSlot) else self._host

    def stats(self) -> TierStats:
        host, disk = self._host.stats(), self.disk.stats()
        return replace(
            host, reserved_bytes=host.reserved_bytes + self.disk.host_bytes, disk_reserved_bytes=disk.reserved_bytes,
            disk_peak_bytes=disk.leased_peak_bytes,
        )  # fmt: skip

    def close(self) -> None:
        self._host.close()
        self.disk.close()
