"""Host memory in contiguous pieces, reserved until training ends: for optimizer state and buffers before a disk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from megatron.swap.common.rounding import ceil_div, round_up
from megatron.swap.common.types import MIB, format_bytes
from megatron.swap.memory.host_memory import PAGE_BYTES, HostMemoryError, HostRegion, prepare_regions

MIN_PIECES_PER_REGION = 64  # that a shared mapping holds at least; a larger piece gets a mapping of its own


class HostArena:
    """Memory for optimizer state in whole pieces, each a tensor; small ones share mappings of ``region_bytes``."""

    def __init__(self, *, limit_bytes: int, pinned: bool, region_bytes: int = 64 * MIB) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0  # whole pages
        self._region_bytes = region_bytes
        self._large_bytes = region_bytes // MIN_PIECES_PER_REGION
        self._device = torch.cuda.current_device() if pinned else None
        self._regions: list[HostRegion] = []
        self._free: torch.Tensor | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return one piece of ``num_bytes``, as ``take_all``."""
        return self.take_all([num_bytes])[0]

    def take_all(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return uint8 tensors of these sizes, from pages' starts, or raise a ``HostMemoryError`` and take none."""
        if not self._fit(sizes):
            raise HostMemoryError(
                f"offloaded optimizer state needs {format_bytes(sum(map(_paged, sizes)))} more of host memory: "
                f"{format_bytes(self.reserved_bytes)} are reserved, the limit is {format_bytes(self.limit_bytes)}. "
                "Raise --swap-host-gib, offload less (a lower --swap-optimizer), or add a disk: --swap-disk-dir."
            )
        large = [_paged(num_bytes) for num_bytes in sizes if num_bytes >= self._large_bytes]
        regions = iter(self._reserve(large))
        pieces = (next(regions) if size >= self._large_bytes else self._cut(_paged(size)) for size in sizes)
        return [_own_storage(piece[:size]) for piece, size in zip(pieces, sizes, strict=True)]

    def sure_bytes(self, num_pieces: int) -> int:
        """Return the bytes that fit in ``num_pieces`` more pieces, whatever their sizes and order."""
        left_bytes = self.limit_bytes - self.reserved_bytes
        if left_bytes >= 2 * self._region_bytes:
            left_bytes -= self._region_bytes  # the last shared mapping may be almost empty
        # Each other shared mapping wastes less than the largest piece that may share a mapping, and each piece less
        # than a page.
        return max(0, left_bytes * (MIN_PIECES_PER_REGION - 1) // MIN_PIECES_PER_REGION - num_pieces * PAGE_BYTES)

    def most_bytes(self, sizes: Sequence[int]) -> int:
        """Return the most bytes that pieces of these ``sizes`` add to ``reserved_bytes``, in any order."""
        large_bytes = sum(_paged(num_bytes) for num_bytes in sizes if num_bytes >= self._large_bytes)
        small_bytes = sum(_paged(num_bytes) for num_bytes in sizes if num_bytes < self._large_bytes)
        if small_bytes:  # each shared mapping but the last wastes less than one piece
            small_bytes = ceil_div(small_bytes * MIN_PIECES_PER_REGION, MIN_PIECES_PER_REGION - 1) + self._region_bytes
        return min(large_bytes + small_bytes, self.limit_bytes - self.reserved_bytes)

    def num_that_fit(self, sizes: Sequence[int]) -> int:
        """Return the largest number of leading ``sizes`` that ``take_all`` has room for."""
        return bisect_left(range(1, len(sizes) + 1), True, key=lambda number: not self._fit(sizes[:number]))

    def _fit(self, sizes: Sequence[int]) -> bool:
        left_bytes = self.limit_bytes - self.reserved_bytes
        left_bytes -= sum(_paged(num_bytes) for num_bytes in sizes if num_bytes >= self._large_bytes)
        free_bytes = self._free.numel() if self._free is not None else 0
        for num_bytes in map(_paged, (num_bytes for num_bytes in sizes if num_bytes < self._large_bytes)):
            if free_bytes < num_bytes:
                free_bytes = self._shared_bytes(left_bytes, num_bytes)
                left_bytes -= free_bytes
            free_bytes -= num_bytes
        return left_bytes >= 0

    def _shared_bytes(self, left_bytes: int, num_bytes: int) -> int:
        # Near the limit a mapping is as large as its first piece, which leaves room for others.
        return self._region_bytes if left_bytes >= 2 * self._region_bytes else num_bytes

    def _cut(self, num_bytes: int) -> torch.Tensor:
        if self._free is None or self._free.numel() < num_bytes:
            (self._free,) = self._reserve([self._shared_bytes(self.limit_bytes - self.reserved_bytes, num_bytes)])
        taken, self._free = self._free[:num_bytes], self._free[num_bytes:]
        return taken

    def _reserve(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        regions, _ = prepare_regions(sizes, device=self._device)
        self._regions += regions
        self.reserved_bytes += sum(sizes)
        return [region.tensor for region in regions]

    def close(self) -> None:
        """Unregister all memory. Every copy must be over. The last tensor on a mapping unmaps it."""
        for region in self._regions:
            region.unregister()
        self._regions.clear()
        self._free = None


def _own_storage(piece: torch.Tensor) -> torch.Tensor:
    # torch.save writes whole storages, so a piece needs a storage of its own.
    with torch.inference_mode(False):
        return torch.from_numpy(piece.numpy())


def _paged(num_bytes: int) -> int:
    return round_up(num_bytes, PAGE_BYTES)
