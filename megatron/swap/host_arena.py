"""Host memory for what stays as long as training does: each piece contiguous, taken once, given back at the end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from megatron.swap.host_memory import (
    PAGE_BYTES,
    HostMemoryError,
    HostRegion,
    PinStrategy,
    gpu_numa_node,
    prepare_regions,
)
from megatron.swap.types import MIB, format_bytes

SHARERS = 64
"""Of a mapping, at least: larger pieces have one of their own."""


class HostArena:
    """Memory for optimizer state. Unlike ``HostPool`` it never splits a piece, so that each is one tensor.

    Args:
        limit_bytes: most that is taken.
        pinned: registered with CUDA for the current device, and near it.
        region_bytes: of a mapping that small pieces share.
    """

    def __init__(self, *, limit_bytes: int, pinned: bool, region_bytes: int = 64 * MIB) -> None:
        self.limit_bytes = limit_bytes
        self.booked_bytes = 0
        self._region_bytes = region_bytes
        self._large_bytes = region_bytes // SHARERS
        self._device = torch.cuda.current_device() if pinned else None
        self._numa_node = gpu_numa_node(self._device) if self._device is not None else None
        self._strategy = PinStrategy(touch="pages" if pinned else "none")
        self._regions: list[HostRegion] = []
        self._free: torch.Tensor | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """``num_bytes`` (uint8) at the beginning of a page. Raises: as ``take_all``."""
        return self.take_all([num_bytes])[0]

    def take_all(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Pieces of these sizes in bytes: at once they are made ready faster than one by one.

        Raises:
            HostMemoryError: the limit does not allow it, and nothing was taken; or the machine does not.
        """
        if not self._fit(sizes):
            raise HostMemoryError(
                f"{format_bytes(sum(map(_paged, sizes)))} more of host memory are wanted for what rests: "
                f"{format_bytes(self.booked_bytes)} are taken, the limit is {format_bytes(self.limit_bytes)}. "
                "Raise --swap-host-gib, let less rest (a lower --swap-optimizer), or add a disk: --swap-disk-dir."
            )
        large = [_paged(num_bytes) for num_bytes in sizes if num_bytes >= self._large_bytes]
        regions = iter(self._book(large))
        return [
            _alone((next(regions) if num_bytes >= self._large_bytes else self._cut(_paged(num_bytes)))[:num_bytes])
            for num_bytes in sizes
        ]

    def sure_bytes(self, num_pieces: int) -> int:
        """Of so many pieces, whatever their sizes and in whatever order they come: so many bytes surely find room."""
        left_bytes = self.limit_bytes - self.booked_bytes
        if left_bytes >= 2 * self._region_bytes:
            left_bytes -= self._region_bytes  # the last mapping that is shared
        # Of each of those before it less is left than a piece that shares.
        return max(0, left_bytes * (SHARERS - 1) // SHARERS - num_pieces * PAGE_BYTES)

    def num_that_fit(self, sizes: Sequence[int]) -> int:
        """How many of the first of them ``take_all`` can take."""
        return bisect_left(range(1, len(sizes) + 1), True, key=lambda number: not self._fit(sizes[:number]))

    def _fit(self, sizes: Sequence[int]) -> bool:
        left_bytes = self.limit_bytes - self.booked_bytes
        left_bytes -= sum(_paged(num_bytes) for num_bytes in sizes if num_bytes >= self._large_bytes)
        free_bytes = self._free.numel() if self._free is not None else 0
        for num_bytes in map(_paged, (num_bytes for num_bytes in sizes if num_bytes < self._large_bytes)):
            if free_bytes < num_bytes:
                free_bytes = self._shared_bytes(left_bytes, num_bytes)
                left_bytes -= free_bytes
            free_bytes -= num_bytes
        return left_bytes >= 0

    def _shared_bytes(self, left_bytes: int, num_bytes: int) -> int:
        """Of the next mapping that is shared. Near the limit no more than is needed: others may want the rest."""
        return self._region_bytes if left_bytes >= 2 * self._region_bytes else num_bytes

    def _cut(self, num_bytes: int) -> torch.Tensor:
        """Out of a mapping that is shared."""
        if self._free is None or self._free.numel() < num_bytes:
            (self._free,) = self._book([self._shared_bytes(self.limit_bytes - self.booked_bytes, num_bytes)])
        taken, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return taken

    def _book(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        regions, _ = prepare_regions(sizes, strategy=self._strategy, device=self._device, numa_node=self._numa_node)
        self._regions += regions
        self.booked_bytes += sum(sizes)
        return [region.tensor for region in regions]

    def close(self) -> None:
        """Registered no longer; a mapping goes when the last tensor on it does. Every copy must be over."""
        for region in self._regions:
            region.unregister()
        self._regions.clear()
        self._free = None


def _alone(piece: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: ``torch.save`` writes whole storages."""
    with torch.inference_mode(False):
        return torch.from_numpy(piece.numpy())


def _paged(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
