"""The tier in host memory: pinned slabs for a GPU, pageable ones for the emulated device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import torch

from megatron.swap.devices.base import Device, Stream
from megatron.swap.memory.host_pool import HostPool, Lease
from megatron.swap.memory.tiers.base import Slot, Tier, TierStats


class HostSlot(Slot, Protocol):
    """Bytes in host memory: a lease of the pool, or memory of the out-of-memory guard."""

    def views(self) -> list[torch.Tensor]: ...  # return the bytes in order, one uint8 tensor for each contiguous piece


class HostTier(Tier):
    """A tier whose slots are leases of ``pool``. A slot in several pieces is copied piece by piece."""

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool

    def reserve(self, num_bytes: int) -> Lease:
        return self.pool.lease(num_bytes)

    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        views = cast(HostSlot, slot).views()
        return device.copy(stream, views, _split_like(source, views))

    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        views = cast(HostSlot, slot).views()
        return device.copy(stream, _split_like(target, views), views)

    def expect(self, slots: Iterable[Slot]) -> None:
        """Do nothing: host memory needs no preparation."""

    def stats(self) -> TierStats:
        stats = self.pool.stats
        return TierStats(stats.reserved_bytes, stats.leased_bytes, stats.leased_peak_bytes)

    def close(self) -> None:
        self.pool.close(force=True)


def _split_like(tensor: torch.Tensor, views: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [tensor] if len(views) == 1 else tensor.split([view.numel() for view in views])
