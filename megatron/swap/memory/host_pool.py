"""The pinned slab pool: where offloaded activations are kept in host memory.

The pool reserves memory in slabs (one mapping and one CUDA registration each) and hands it out as leases. A lease may
consist of several extents, so the pool grows only when the free bytes of all slabs together do not suffice:
fragmentation never costs memory. An extent never crosses a slab, because CUDA refuses a copy that spans two
registrations.

All sizes are bytes. Everything handed out is a whole number of pages (``PAGE_BYTES``) and aligned to a page, so that
direct disk I/O can use the same memory.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.swap.common.log import logger
from megatron.swap.common.rounding import round_down, round_up
from megatron.swap.common.types import MIB, SwapError, format_bytes
from megatron.swap.memory.host_budget import HostMemoryBudget
from megatron.swap.memory.host_memory import (
    PAGE_BYTES,
    HostMemoryError,
    HostRegion,
    PinStrategy,
    PrepareTimes,
    gpu_numa_node,
    prepare_regions,
)

MIN_SPLIT_BYTES = 4 * MIB
"""Smaller extents copy noticeably slower than the link allows (1 MiB: 86 % of full speed, 4 MiB: 96 %)."""

MAX_KNOWN_VIEWS = 10_000
"""Views that a pool keeps for the next use of the same extents."""


class LeaseError(SwapError):
    """A lease was used after ``free``, or the pool after ``close``, or the pool was closed with leases not freed."""


@dataclass(frozen=True, slots=True)
class Extent:
    """``nbytes`` (whole pages) at ``offset`` of slab number ``slab``."""

    slab: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PoolStats:
    """The figures of a pool at one moment. ``leased_bytes`` counts whole pages; reserved bytes not leased are free."""

    reserved_bytes: int
    leased_bytes: int
    leased_peak_bytes: int
    num_slabs: int
    num_leases: int


class Lease:
    """Memory of the pool that belongs to one owner until ``free``. Made by ``HostPool.lease`` only.

    A lease that is dropped without ``free`` keeps its memory: only its owner knows which copy reads it last.

    Attributes:
        nbytes: as requested; the extents are longer, up to the end of a page.
        fence: the largest fence with which any part of this memory was freed before. The first write must be ordered
            behind that copy. 0: no copy.
    """

    __slots__ = ("_live", "_pool", "extents", "fence", "nbytes")

    def __init__(self, pool: HostPool, extents: tuple[Extent, ...], nbytes: int, fence: int) -> None:
        self.extents = extents
        self.nbytes = nbytes
        self.fence = fence
        self._pool = pool
        # Popped by free(): list.pop is atomic, so of two racing calls exactly one succeeds.
        self._live = [True]

    @property
    def is_freed(self) -> bool:
        """Whether ``free`` was called."""
        return not self._live

    def views(self, *, padded: bool = False) -> list[torch.Tensor]:
        """Return one uint8 tensor per extent, in order, together exactly ``nbytes`` long.

        The tensors must not be used after ``free``. Nothing prevents that; with ``poison`` they then read NaN.

        Args:
            padded: extend the last tensor to the end of its page, since direct I/O writes whole pages.

        Raises:
            LeaseError: after ``free``, or when the pool is closed.
        """
        if self.is_freed:
            raise LeaseError(f"views() of a lease of {self.nbytes} bytes that was freed already")
        paged_bytes = sum([extent.nbytes for extent in self.extents])
        return self._pool._views(self.extents, 0 if padded else paged_bytes - self.nbytes)

    def free(self, fence: int = 0) -> None:
        """Return the memory to the pool. Takes no lock: any thread and any finalizer may call it at any moment.

        Args:
            fence: sequence number of the last copy that may still read the memory; 0: none.

        Raises:
            LeaseError: the second time.
        """
        try:
            self._live.pop()
        except IndexError:
            raise LeaseError(f"a lease of {self.nbytes} bytes was freed twice") from None
        # An owner that never wrote has not waited for the previous owners' reads, which may still be under way.
        self._pool._freed.append((self.extents, max(fence, self.fence)))


class HostPool:
    """Pinned host memory, reserved in slabs on demand and leased in extents.

    Except for what ``reserve`` asks for ahead of need, reserved_bytes <= leased_peak_bytes + one slab.

    lease(), reserve(), stats and close() take a lock; any thread may call them, but no finalizer. Lease.free() is safe
    in finalizers. Garbage collection may run one inside any of these calls, in the thread that holds the lock: taking
    the lock would deadlock, and changing the free list at once would corrupt it in the middle of a search. So ``free``
    only appends to a deque, which is atomic, and the next call of the pool empties that deque.

    Args:
        limit: the most bytes to reserve, in whole pages; or a budget, whose unreserved bytes are the limit at the
            moment when the pool grows.
        pinned: register the slabs with CUDA, and place them near the device.
        slab_bytes: size of a slab; whole pages. The last one before the limit may be smaller.
        device: index of the CUDA device; default: the current one.
        numa_node: NUMA node of the slabs; default: the device's.
        strategy: how fresh memory is made ready.
        poison: fill memory that is not leased with 0xFF bytes (NaN in every floating type), so that a copy that runs
            too late or too early yields NaN instead of a plausible number. Whole slabs become resident: use small ones.
        available_bytes: returns the host memory that there is now. The pool does not grow beyond it: another
            process may have taken what there was at the start. ``None``: only ``limit`` counts.
        wait_fence: called with a fence before memory that was freed with that fence is poisoned. It returns when that
            copy, which may still read the memory, is over. It must not call the pool.

    Attributes:
        budget: the given budget, or a new one of ``limit`` bytes.

    Raises:
        ValueError: ``slab_bytes`` is no whole number of pages, or ``limit`` is less than one page.
    """

    def __init__(
        self,
        *,
        limit: int | HostMemoryBudget,
        pinned: bool,
        slab_bytes: int = 1 << 30,
        device: int | None = None,
        numa_node: int | None = None,
        strategy: PinStrategy | None = None,
        poison: bool = False,
        wait_fence: Callable[[int], None] | None = None,
        available_bytes: Callable[[], int] | None = None,
    ) -> None:
        if slab_bytes <= 0 or slab_bytes % PAGE_BYTES:
            raise ValueError(f"slab_bytes must be a positive multiple of {PAGE_BYTES}, got {slab_bytes}")
        if isinstance(limit, int):
            if limit < PAGE_BYTES:
                raise ValueError(f"limit must be at least one page ({PAGE_BYTES} bytes), got {limit}")
            limit = HostMemoryBudget(limit)
        self.budget = limit
        if pinned and device is None:
            device = torch.cuda.current_device()
        if pinned and device is not None and numa_node is None:
            numa_node = gpu_numa_node(device)
            if numa_node is None:
                logger.debug("NUMA node of CUDA device %d unknown: host memory is not placed near it", device)
        self.slab_bytes = slab_bytes
        self.pinned = pinned
        self.last_growth: PrepareTimes | None = None
        """Times of the latest growth, for reports; None before the first."""
        self._device = device if pinned else None
        self._numa_node = numa_node
        # Without registration pages are not needed before their first use, and only a few of a slab may be used.
        self._strategy = strategy or PinStrategy(touch="pages" if pinned else "none")
        self._poison = poison
        self._wait_fence = wait_fence
        self._available_bytes = available_bytes
        self._lock = threading.Lock()
        self._freed: deque[tuple[tuple[Extent, ...], int]] = deque()
        self._slabs: list[HostRegion] = []
        self._free = _FreeSpace()
        self._known: dict[tuple[int, int, int], torch.Tensor] = {}  # views; every step leases the same extents again
        self._reserved_bytes = 0
        self._leased_bytes = 0
        self._leased_peak_bytes = 0
        self._num_leases = 0
        self._closed = False

    @property
    def limit_bytes(self) -> int:
        """The most that the pool may reserve now, in whole pages. Below the reserved bytes if the budget has shrunk."""
        return max(0, round_down(self.budget.unreserved_bytes, PAGE_BYTES))

    def reserve(self, nbytes: int) -> None:
        """Grow the pool to at least ``nbytes`` now, so that later leases do not wait for pages.

        Raises:
            HostMemoryError: the limit or the machine does not allow it; the pool is then unchanged.
            LeaseError: the pool is closed.
        """
        with self._lock:
            self._check_open()
            if nbytes > self._reserved_bytes:
                self._grow(nbytes - self._reserved_bytes, f"a reservation of {format_bytes(nbytes)}")

    def lease(self, nbytes: int) -> Lease:
        """Lease ``nbytes``: one extent if a free block is large enough, else several.

        Raises:
            ValueError: ``nbytes`` is below 1.
            LeaseError: the pool is closed.
            HostMemoryError: the pool must grow, and the limit or the machine does not allow it; the pool is then
                unchanged.
        """
        if nbytes < 1:
            raise ValueError(f"a lease needs at least 1 byte, got {nbytes}")
        paged_bytes = round_up(nbytes, PAGE_BYTES)
        with self._lock:
            self._check_open()
            self._absorb()
            if paged_bytes > self._free.nbytes:
                self._grow(paged_bytes - self._free.nbytes, f"a lease of {format_bytes(nbytes)}")
            extents, fence = self._free.take(paged_bytes)
            self._leased_bytes += paged_bytes
            self._leased_peak_bytes = max(self._leased_peak_bytes, self._leased_bytes)
            self._num_leases += 1
            return Lease(self, extents, nbytes, fence)

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more can be leased now, as far as the limit and the machine's free memory say."""
        with self._lock:
            self._absorb()
            room_bytes = self.limit_bytes - self._reserved_bytes
            if self._available_bytes is not None:
                room_bytes = min(room_bytes, self._available_bytes())
            return round_up(num_bytes, PAGE_BYTES) <= self._free.nbytes + room_bytes

    @property
    def stats(self) -> PoolStats:
        """The figures now. All memory that was freed so far counts as free."""
        with self._lock:
            self._absorb()
            return PoolStats(
                self._reserved_bytes,
                self._leased_bytes,
                self._leased_peak_bytes,
                len(self._slabs),
                self._num_leases,
            )

    def close(self, *, force: bool = False) -> None:
        """Unregister and release all memory; a second call does nothing. Every copy must be over.

        A slab is unmapped when the last tensor on it is gone.

        Args:
            force: close although leases are not freed, to clean up after an error. Their views are then pageable
                memory.

        Raises:
            LeaseError: leases are not freed.
        """
        with self._lock:
            if self._closed:
                return
            self._absorb()
            if self._num_leases and not force:
                raise LeaseError(
                    f"the host pool cannot be closed: {self._num_leases} leases "
                    f"({format_bytes(self._leased_bytes)}) are not freed"
                )
            self._closed = True
            for slab in self._slabs:
                slab.unregister()
            self._slabs.clear()
            self._known.clear()  # each view keeps its slab mapped
            self._free = _FreeSpace()
            self._reserved_bytes = self._leased_bytes = self._num_leases = 0

    def _views(self, extents: tuple[Extent, ...], excess_bytes: int) -> list[torch.Tensor]:
        """Return one tensor per extent, the last one shorter by ``excess_bytes``."""
        ends = [extent.offset + extent.nbytes for extent in extents]
        ends[-1] -= excess_bytes
        with self._lock:
            self._check_open()
            return [self._view(e.slab, e.offset, end) for e, end in zip(extents, ends, strict=True)]

    def _view(self, slab: int, start: int, end: int) -> torch.Tensor:
        view = self._known.get((slab, start, end))
        if view is None:
            if len(self._known) >= MAX_KNOWN_VIEWS:
                self._known.clear()
            view = self._known[slab, start, end] = self._slabs[slab].tensor[start:end]
        return view

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseError("the host pool is closed")

    def _absorb(self) -> None:
        """Make the memory of freed leases available. Runs under the lock."""
        while self._freed:
            extents, fence = self._freed[0]  # only this method removes entries, so the first one stays the first
            if self._poison and fence and self._wait_fence is not None and not self._closed:
                self._wait_fence(fence)
            self._freed.popleft()
            if self._closed:
                continue
            for extent in extents:
                self._add_free(extent, fence)
                self._leased_bytes -= extent.nbytes
            self._num_leases -= 1

    def _add_free(self, extent: Extent, fence: int) -> None:
        if self._poison:
            ctypes.memset(self._slabs[extent.slab].address + extent.offset, 0xFF, extent.nbytes)
        self._free.add(extent, fence)

    def _slab_sizes(self, short_bytes: int, room_bytes: int, purpose: str) -> list[int]:
        """Return the sizes of slabs for ``short_bytes``: whole slabs if the machine has the memory now."""
        available_bytes = None if self._available_bytes is None else self._available_bytes()
        if available_bytes is not None and available_bytes < short_bytes:
            raise HostMemoryError(
                f"the host pool cannot provide {purpose}: {format_bytes(available_bytes)} of host memory are available "
                f"now, fewer than at the start: another process has taken them, or a limit of the cgroup. "
                f"{format_bytes(self._reserved_bytes)} are reserved. End that process or swap fewer layers "
                "(--swap-layers). For a machine whose memory grows on demand, --swap-host-unchecked ends this check."
            )
        sizes: list[int] = []
        needed_bytes = short_bytes
        while needed_bytes > 0:
            sizes.append(min(self.slab_bytes, room_bytes))
            needed_bytes -= sizes[-1]
            room_bytes -= sizes[-1]
        if available_bytes is not None and sum(sizes) > available_bytes:
            sizes[-1] -= sum(sizes) - short_bytes
        return sizes

    def _grow(self, short_bytes: int, purpose: str) -> None:
        """Reserve slabs for at least ``short_bytes`` more. Runs under the lock."""
        limit_bytes = self.limit_bytes
        room_bytes = limit_bytes - self._reserved_bytes
        if short_bytes > room_bytes:
            raise HostMemoryError(
                f"the host pool cannot provide {purpose}: {format_bytes(self._leased_bytes)} are leased, "
                f"{format_bytes(self._reserved_bytes)} reserved, the limit is {format_bytes(limit_bytes)} "
                f"(reserved by others: {self.budget.holders()}). "
                "Raise --swap-host-gib or swap fewer layers (--swap-layers)."
            )
        sizes = self._slab_sizes(short_bytes, room_bytes, purpose)
        regions, self.last_growth = prepare_regions(
            sizes, strategy=self._strategy, device=self._device, numa_node=self._numa_node
        )
        if self._numa_node is not None and not all(region.near_node for region in regions):
            logger.debug("pages cannot be placed on NUMA node %d: the system refuses", self._numa_node)
            self._numa_node = None  # log it once, and do not try again
        for region in regions:
            self._slabs.append(region)
            self._reserved_bytes += region.nbytes
            self._add_free(Extent(len(self._slabs) - 1, 0, region.nbytes), 0)


class _FreeSpace:
    """The free blocks of all slabs, found by size (best fit) and by address (coalescing). No two blocks touch.

    A search is O(log n). An insertion into the sorted ``_sizes`` moves n pointers, which is negligible for a few
    thousand blocks.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._starts: dict[tuple[int, int], tuple[int, int]] = {}  # (slab, offset) -> (nbytes, fence)
        self._ends: dict[tuple[int, int], int] = {}  # (slab, end) -> offset
        self._sizes: list[tuple[int, int, int]] = []  # sorted (nbytes, slab, offset)

    def blocks(self) -> list[Extent]:
        """All blocks, smallest first."""
        return [Extent(slab, offset, nbytes) for nbytes, slab, offset in self._sizes]

    def add(self, extent: Extent, fence: int) -> None:
        """Add a block, joined with its free neighbours; the joint block has the largest of their fences."""
        slab, offset, nbytes = extent.slab, extent.offset, extent.nbytes
        self.nbytes += nbytes
        left_offset = self._ends.get((slab, offset))
        if left_offset is not None:
            left_nbytes, left_fence = self._remove(slab, left_offset)
            offset, nbytes, fence = left_offset, left_nbytes + nbytes, max(fence, left_fence)
        if (slab, offset + nbytes) in self._starts:
            right_nbytes, right_fence = self._remove(slab, offset + nbytes)
            nbytes, fence = nbytes + right_nbytes, max(fence, right_fence)
        self._insert(slab, offset, nbytes, fence)

    def take(self, nbytes: int) -> tuple[tuple[Extent, ...], int]:
        """Cut out ``nbytes``, at most ``self.nbytes``. Returns the extents and the largest fence of their blocks."""
        extents = []
        largest_fence = 0
        for extent in self._choose(nbytes):
            block_nbytes, fence = self._remove(extent.slab, extent.offset)
            if block_nbytes > extent.nbytes:
                self._insert(extent.slab, extent.offset + extent.nbytes, block_nbytes - extent.nbytes, fence)
            extents.append(extent)
            largest_fence = max(largest_fence, fence)
        self.nbytes -= nbytes
        return tuple(extents), largest_fence

    def _choose(self, nbytes: int) -> list[Extent]:
        """Choose the extents to cut: from the best-fitting block, else the largest blocks and a best fit for the rest.

        No extent is below MIN_SPLIT_BYTES unless the blocks leave no choice: a short last extent takes some bytes from
        the one before. Extents are cut from the start of a block.
        """
        chosen: list[Extent] = []
        end = len(self._sizes)
        while True:
            best = bisect_left(self._sizes, (nbytes, -1, -1), hi=end)
            if best < end:
                break
            end -= 1
            size, slab, offset = self._sizes[end]
            chosen.append(Extent(slab, offset, size))
            nbytes -= size
        missing = MIN_SPLIT_BYTES - nbytes
        last = chosen[-1] if chosen and missing > 0 else None
        if last and last.nbytes - missing >= MIN_SPLIT_BYTES and self._sizes[end - 1][0] >= MIN_SPLIT_BYTES:
            chosen[-1] = Extent(last.slab, last.offset, last.nbytes - missing)
            nbytes = MIN_SPLIT_BYTES
            best = bisect_left(self._sizes, (nbytes, -1, -1), hi=end)
        _, slab, offset = self._sizes[best]
        chosen.append(Extent(slab, offset, nbytes))
        return chosen

    def _insert(self, slab: int, offset: int, nbytes: int, fence: int) -> None:
        self._starts[slab, offset] = (nbytes, fence)
        self._ends[slab, offset + nbytes] = offset
        insort(self._sizes, (nbytes, slab, offset))

    def _remove(self, slab: int, offset: int) -> tuple[int, int]:
        nbytes, fence = self._starts.pop((slab, offset))
        del self._ends[slab, offset + nbytes]
        del self._sizes[bisect_left(self._sizes, (nbytes, slab, offset))]
        return nbytes, fence
