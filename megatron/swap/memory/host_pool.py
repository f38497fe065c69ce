"""The pinned slab pool, where offloaded activations lie in host memory.

All sizes are bytes. Slabs, extents and free blocks are whole pages (``PAGE_BYTES``) and begin at a page.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.swap.common.rounding import round_down, round_up
from megatron.swap.common.types import MIB, SwapError, format_bytes
from megatron.swap.memory.host_budget import HostMemoryBudget
from megatron.swap.memory.host_memory import PAGE_BYTES, HostMemoryError, HostRegion, PrepareTimes, prepare_regions

# An extent of 1 MiB copies at 86 % of the link's full speed, one of 4 MiB at 96 % (H200, PCIe 5).
MIN_SPLIT_BYTES = 4 * MIB
MAX_KNOWN_VIEWS = 10_000  # views that a pool keeps for the next use of the same extents


class LeaseError(SwapError):
    """A lease was used after ``free``, or the pool after ``close``, or the pool was closed with leases not freed."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes of one slab. CUDA refuses a copy across two registrations, so no extent spans two slabs."""

    slab: int  # number of the slab
    offset: int  # bytes from the slab's start
    nbytes: int  # whole pages


@dataclass(frozen=True)
class PoolStats:
    """The figures of a pool at one moment."""

    reserved_bytes: int  # bytes of all slabs; free unless leased
    leased_bytes: int  # whole pages
    leased_peak_bytes: int
    num_slabs: int
    num_leases: int


class Lease:
    """Memory of a pool that belongs to one owner until ``free``. ``HostPool.lease`` makes leases.

    A dropped lease keeps its memory unless ``free`` was called: only the owner knows the last copy that reads it.
    """

    __slots__ = ("_live", "_pool", "extents", "fence", "nbytes")

    def __init__(self, pool: HostPool, extents: tuple[Extent, ...], nbytes: int, fence: int) -> None:
        self.extents = extents  # several, so that fragmentation of the slabs never costs memory
        self.nbytes = nbytes  # as requested; the last extent is longer, up to the end of its page
        # The number of the last copy that may still read this memory for a previous owner; 0 if there is none.
        # The first write must be ordered behind that copy.
        self.fence = fence
        self._pool = pool
        self._live = [True]  # `free` pops the entry: list.pop is atomic, so exactly one of two racing calls succeeds

    @property
    def is_freed(self) -> bool:
        return not self._live

    def views(self) -> list[torch.Tensor]:
        """Return one uint8 tensor per extent, in order, together ``nbytes`` long. Do not use them after ``free``."""
        if self.is_freed:
            raise LeaseError(f"views() of a lease of {self.nbytes} bytes that was freed already")
        return self._pool._views(self.extents, self.nbytes)

    def free(self, fence: int = 0) -> None:
        """Return the memory, once, on any thread at any moment. ``fence``: the last copy that may read it, or 0."""
        try:
            self._live.pop()
        except IndexError:
            raise LeaseError(f"a lease of {self.nbytes} bytes was freed twice") from None
        # An owner that never wrote has not waited for the reads of previous owners, so their fence stays.
        # No lock: a finalizer may run in the thread that holds the pool's lock, in the middle of a search.
        # The append is atomic, and the pool's next call takes the entry.
        self._pool._freed.append((self.extents, max(fence, self.fence)))


class HostPool:
    """Pinned host memory, reserved in slabs on demand and leased in extents.

    A slab is one mapping with one CUDA registration. The pool grows only if all free bytes together do not suffice. So
    reserved bytes <= ``leased_peak_bytes`` + one slab, unless ``reserve`` asked for more.

    Any thread may call any method, and no finalizer may: finalizers call ``Lease.free`` only.

    Args:
        limit: the most bytes to reserve. A budget's limit is its unreserved bytes when the pool grows.
        pinned: register the slabs with CUDA ``device``, by default the current one, and place them near it.
        slab_bytes: whole pages. The last slab before the limit may be smaller.
        poison: fill memory that is not leased with 0xFF bytes: NaN, so that a copy too late or too early shows.
        available_bytes: returns the host memory available now, which the pool does not exceed.
    """

    def __init__(
        self, *, limit: int | HostMemoryBudget, pinned: bool, slab_bytes: int = 1 << 30, device: int | None = None,
        poison: bool = False, available_bytes: Callable[[], int] | None = None,
    ) -> None:  # fmt: skip
        self.budget = HostMemoryBudget(limit) if isinstance(limit, int) else limit
        self._device = None if not pinned else torch.cuda.current_device() if device is None else device
        self.slab_bytes = slab_bytes
        self.pinned = pinned
        self.last_growth: PrepareTimes | None = None  # of the latest growth; None before the first
        self._poison = poison
        self._available_bytes = available_bytes
        self._lock = threading.Lock()  # of all below but `_freed`; no finalizer takes it
        self._freed: deque[tuple[tuple[Extent, ...], int]] = deque()
        self._slabs: list[HostRegion] = []
        self._free = _FreeSpace()
        self._known: dict[tuple[int, int, int], torch.Tensor] = {}  # views: every step leases the same extents again
        self._reserved_bytes = 0
        self._leased_bytes = 0
        self._leased_peak_bytes = 0
        self._num_leases = 0
        self._closed = False

    @property
    def limit_bytes(self) -> int:
        """The most bytes that the pool may reserve now. A budget that shrank may leave less than is reserved."""
        return max(0, round_down(self.budget.unreserved_bytes, PAGE_BYTES))

    def reserve(self, nbytes: int) -> None:
        """Grow the pool to at least ``nbytes`` now, so that later leases do not wait for pages. Raises as ``lease``."""
        with self._lock:
            self._check_open()
            if nbytes > self._reserved_bytes:
                self._grow(nbytes - self._reserved_bytes, f"a reservation of {format_bytes(nbytes)}")

    def lease(self, nbytes: int) -> Lease:
        """Lease ``nbytes``, in one extent if possible, or raise a ``HostMemoryError`` if the pool cannot grow."""
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
        """Whether the limit and the machine's free memory allow a lease of ``num_bytes`` now."""
        with self._lock:
            self._absorb()
            room_bytes = self.limit_bytes - self._reserved_bytes
            if self._available_bytes is not None:
                room_bytes = min(room_bytes, self._available_bytes())
            return round_up(num_bytes, PAGE_BYTES) <= self._free.nbytes + room_bytes

    @property
    def stats(self) -> PoolStats:
        """The figures now. The memory of freed leases counts as free."""
        with self._lock:
            self._absorb()
            return PoolStats(
                self._reserved_bytes, self._leased_bytes, self._leased_peak_bytes, len(self._slabs), self._num_leases
            )

    def close(self, *, force: bool = False) -> None:
        """Release all memory: no copy may be under way. Raises a ``LeaseError`` for leases, unless ``force``."""
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
            self._known.clear()  # the last view of a slab keeps the slab mapped
            self._free = _FreeSpace()
            self._reserved_bytes = self._leased_bytes = self._num_leases = 0

    def _views(self, extents: tuple[Extent, ...], nbytes: int) -> list[torch.Tensor]:
        views = []
        with self._lock:
            self._check_open()
            for extent in extents:
                start, end = extent.offset, extent.offset + min(extent.nbytes, nbytes)
                nbytes -= extent.nbytes
                key = extent.slab, start, end
                if key not in self._known:
                    if len(self._known) >= MAX_KNOWN_VIEWS:
                        self._known.clear()
                    self._known[key] = self._slabs[extent.slab].tensor[start:end]
                views.append(self._known[key])
        return views

    def _check_open(self) -> None:
        if self._closed:
            raise LeaseError("the host pool is closed")

    def _absorb(self) -> None:
        """Make the memory of freed leases available, under the lock."""
        while self._freed:
            extents, fence = self._freed.popleft()
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
        # The machine has too little memory for whole slabs: shorten the last slab, so that the sum is `short_bytes`.
        if available_bytes is not None and sum(sizes) > available_bytes:
            sizes[-1] -= sum(sizes) - short_bytes
        return sizes

    def _grow(self, short_bytes: int, purpose: str) -> None:
        """Reserve slabs for at least ``short_bytes`` more, under the lock."""
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
        # Pageable slabs are touched at first use: a run may use only a few pages of a slab.
        regions, self.last_growth = prepare_regions(sizes, device=self._device)
        for region in regions:
            self._slabs.append(region)
            self._reserved_bytes += region.nbytes
            self._add_free(Extent(len(self._slabs) - 1, 0, region.nbytes), 0)


class _FreeSpace:
    """The free blocks of all slabs, found by size (best fit) and by address (coalescing). No two blocks touch."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._starts: dict[tuple[int, int], tuple[int, int]] = {}  # (slab, offset) -> (nbytes, fence)
        self._ends: dict[tuple[int, int], int] = {}  # (slab, end) -> offset
        # Sorted (nbytes, slab, offset). A search is O(log n). An insertion moves n pointers, which is negligible for a
        # few thousand blocks.
        self._sizes: list[tuple[int, int, int]] = []

    def add(self, extent: Extent, fence: int) -> None:
        """Add a block, joined with its free neighbours. The joint block has the largest of their fences."""
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
        """Cut out ``nbytes``, at most ``self.nbytes``. Return the extents and the largest fence of their blocks."""
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
        """Choose extents at the starts of blocks: the best fit, else the largest blocks and a best fit for the rest."""
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
        # An extent below MIN_SPLIT_BYTES copies slowly: a short last extent takes bytes from the extent before it.
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
