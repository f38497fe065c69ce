"""Host memory: pinned slabs beside a GPU, plain ones under the emulation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from megatron.swap.devices.base import Device, Stream
from megatron.swap.host_pool import HostPool, Lease
from megatron.swap.tiers.base import Slot, Tier, TierStats


class HostTier(Tier):
    """Slots are leases of a ``HostPool``; a lease in several extents is copied piece by piece."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool

    def reserve(self, num_bytes: int) -> Lease:
        return self.pool.lease(num_bytes)

    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        views = cast(Lease, slot).views()
        return device.copy(stream, views, source.split([view.numel() for view in views]))

    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        views = cast(Lease, slot).views()
        return device.copy(stream, target.split([view.numel() for view in views]), views)

    def expect(self, slots: Iterable[Slot]) -> None:
        """All are at hand."""

    def stats(self) -> TierStats:
        stats = self.pool.stats
        return TierStats(stats.booked_bytes, stats.leased_bytes, stats.leased_peak_bytes)

    def close(self) -> None:
        self.pool.close(force=True)
