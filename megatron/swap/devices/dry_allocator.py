"""The blocks of PyTorch's caching allocator on a GPU, without memory: the bytes that it would have reserved.

The rules are those of ``CUDACachingAllocator``. Small and large requests have separate blocks. Requests are rounded to
512 bytes. The smallest free block that is large enough is taken and split; of equal blocks, the lowest address. A new
segment is made if no block is large enough. A freed block is joined with free neighbours in its segment.

With ``expandable_segments:True`` small and large requests have one segment each, parts of which have memory, in whole
pages. The segment gets more memory at the lowest address with enough room. A free block before a part without memory
counts as large as it can become, so it is taken only if no other free block is large enough.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from megatron.swap.common.types import MIB
from megatron.swap.devices.base import ALIGNMENT_BYTES

SMALL_BYTES = MIB  # largest request that counts as small, and least rest of a large block that is split off
# Segments for small requests, and for requests below MEDIUM_BYTES; larger segments are multiples of the step. Pages of
# expandable segments have the first two sizes.
SMALL_SEGMENT, MEDIUM_SEGMENT, MEDIUM_BYTES, SEGMENT_STEP = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
NO_END = 2**60  # bytes of an expandable segment, beyond any request


@dataclass(eq=False, slots=True)
class Block:
    """A block of a segment, free or not, between its neighbours there."""

    num_bytes: int
    address: int
    is_small: bool
    is_free: bool = False
    is_mapped: bool = True  # has memory
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """The order in which free blocks are taken."""
        return self.num_bytes, self.address

    @property
    def most_bytes(self) -> int:
        """The size that the block can grow to."""
        if self.after is None or self.after.is_mapped:
            return self.num_bytes
        return self.num_bytes + self.after.num_bytes


class DryAllocator:
    """The blocks of a device.

    Before reserving more than ``capacity_bytes``, the allocator gives back all free memory, as PyTorch's on a full
    device. If that does not suffice, it reserves more all the same.
    """

    def __init__(self, expandable: bool = False, capacity_bytes: int = NO_END) -> None:
        self.reserved_bytes = self.peak_bytes = 0  # sum of all segments now, and at most so far
        self.num_retries = 0  # times that the capacity was reached
        self._capacity_bytes = capacity_bytes
        self._is_expandable = expandable
        # Address of a segment. New segments lie below, as 320 of 346 did in a run on an H200 (docs/results:
        # h200-allocator).
        self._lowest = 0
        self._free: tuple[list[Block], list[Block]] = ([], [])
        self._unmapped: tuple[list[Block], list[Block]] = ([], [])  # by address
        if expandable:
            for is_small in (False, True):
                self._unmapped[is_small].append(Block(NO_END, 0, is_small, is_free=True, is_mapped=False))

    def allocate(self, num_bytes: int) -> Block:
        num_bytes = max(ALIGNMENT_BYTES, _rounded(num_bytes, ALIGNMENT_BYTES))
        is_small = num_bytes <= SMALL_BYTES
        free = self._free[is_small]
        found = bisect_left(free, num_bytes, key=lambda block: block.num_bytes)
        while found + 1 < len(free) and free[found + 1].most_bytes < free[found].most_bytes:
            found += 1
        block = free.pop(found) if found < len(free) else self._new(num_bytes, is_small)
        block.is_free = False
        rest = block.num_bytes - num_bytes
        if rest >= ALIGNMENT_BYTES if is_small or self._is_expandable else rest > SMALL_BYTES:
            self._add(_split(block, num_bytes))
        return block

    def free(self, block: Block) -> None:
        self._add_joined(block)

    def release_cached(self) -> None:
        """Give back the segments without blocks in use. Expandable segments give back all free pages."""
        for free in self._free:
            for block in list(free):
                if self._is_expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    free.remove(block)
                    self.reserved_bytes -= block.num_bytes

    def _new(self, num_bytes: int, is_small: bool) -> Block:
        if self._is_expandable:
            return self._expanded(num_bytes, is_small)
        size = SMALL_SEGMENT if is_small else MEDIUM_SEGMENT
        if num_bytes >= MEDIUM_BYTES:
            size = _rounded(num_bytes, SEGMENT_STEP)
        self._make_room(size)
        self._reserve(size)
        self._lowest -= size
        return Block(size, self._lowest, is_small)

    def _make_room(self, num_bytes: int) -> None:
        if self.reserved_bytes + num_bytes > self._capacity_bytes:
            self.num_retries += 1
            self.release_cached()

    def _reserve(self, num_bytes: int) -> None:
        self.reserved_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)

    def _expanded(self, num_bytes: int, is_small: bool) -> Block:
        """Return the block at the lowest address that can have ``num_bytes``, with memory for them."""

        def lowest() -> Block:
            candidates = map(_first_free, self._unmapped[is_small])
            return next(first for first in candidates if _room(first, num_bytes) >= num_bytes)

        self._make_room(_missing(lowest(), num_bytes))
        block = lowest()
        if not block.is_mapped:
            block = self._map(block, num_bytes)
        while block.num_bytes < num_bytes:
            assert block.after is not None
            block = self._map(block.after, num_bytes - block.num_bytes)
        self._free[is_small].remove(block)
        return block

    def _map(self, block: Block, num_bytes: int) -> Block:
        """Give memory to the first ``num_bytes`` of ``block``, in whole pages, and return the free block there."""
        self._unmapped[block.is_small].remove(block)
        num_bytes = min(_rounded(num_bytes, _page(block)), block.num_bytes)
        if num_bytes < block.num_bytes:
            self._insert_unmapped(_split(block, num_bytes))
        block.is_mapped = True
        self._reserve(num_bytes)
        return self._add_joined(block)

    def _unmap(self, block: Block) -> None:
        """Take the memory of whole pages from ``block``, which is free."""
        page = _page(block)
        begin = _rounded(block.address, page)
        num_bytes = (block.address + block.num_bytes) // page * page - begin
        if num_bytes <= 0:
            return
        self._free[block.is_small].remove(block)
        if begin > block.address:
            middle = _split(block, begin - block.address)
            self._add(block)
            block = middle
        if num_bytes < block.num_bytes:
            self._add(_split(block, num_bytes))
        block.is_free, block.is_mapped = True, False
        self.reserved_bytes -= num_bytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.is_mapped:
                self._unmapped[block.is_small].remove(neighbour)
                block = _joined(block, neighbour)
        self._insert_unmapped(block)

    def _add_joined(self, block: Block) -> Block:
        """Join ``block`` with its free neighbours, and return the joint free block."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free and neighbour.is_mapped:
                self._free[block.is_small].remove(neighbour)
                block = _joined(block, neighbour)
        self._add(block)
        return block

    def _add(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], block, key=lambda one: one.key)

    def _insert_unmapped(self, block: Block) -> None:
        insort(self._unmapped[block.is_small], block, key=lambda one: one.address)


def _split(block: Block, num_bytes: int) -> Block:
    """Leave ``num_bytes`` to ``block``, and return the rest, which is in no list."""
    rest = Block(block.num_bytes - num_bytes, block.address + num_bytes, block.is_small, block.is_free, block.is_mapped)
    block.num_bytes = num_bytes
    rest.before, rest.after, block.after = block, block.after, rest
    if rest.after is not None:
        rest.after.before = rest
    return rest


def _joined(block: Block, neighbour: Block) -> Block:
    first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
    first.num_bytes += second.num_bytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first
    return first


def _first_free(unmapped: Block) -> Block:
    """Return ``unmapped``, or the free block before it."""
    return unmapped.before if unmapped.before is not None and unmapped.before.is_free else unmapped


def _room(block: Block | None, num_bytes: int) -> int:
    """Return the free bytes from ``block`` on, up to at least ``num_bytes``."""
    room = 0
    while block is not None and block.is_free and room < num_bytes:
        room += block.num_bytes
        block = block.after
    return room


def _missing(block: Block | None, num_bytes: int) -> int:
    """Return the bytes to map, in whole pages, so that ``num_bytes`` from ``block`` on have memory."""
    missing = 0
    while block is not None and num_bytes > 0:
        if not block.is_mapped:
            missing += min(block.num_bytes, _rounded(num_bytes, _page(block)))
        num_bytes -= block.num_bytes
        block = block.after
    return missing


def _page(block: Block) -> int:
    return SMALL_SEGMENT if block.is_small else MEDIUM_SEGMENT


def _rounded(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step
