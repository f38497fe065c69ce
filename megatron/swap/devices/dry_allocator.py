"""The blocks of PyTorch's caching allocator on a GPU, without the memory: how much it would have reserved.

The rules are those of ``CUDACachingAllocator``: requests are rounded to 512 bytes; the smallest free block that is
large enough is taken, and split; a new segment is made where none is; a freed block is joined with free neighbours in
its segment. Small and large requests have separate blocks. With ``expandable_segments:True`` each of both has one
segment, which grows at its end. Its last block counts as large as it can become, so it is taken only if no other free
block is large enough (PyTorch: any block before a hole, of which there are more once memory was given back).
``release_cached`` gives back parts that PyTorch would keep.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from megatron.swap.common.types import MIB
from megatron.swap.devices.base import ALIGNMENT_BYTES

SMALL_BYTES = MIB
"""Largest request that counts as small, and least rest of a large block that is split off."""
SMALL_SEGMENT, MEDIUM_SEGMENT, MEDIUM_BYTES, SEGMENT_STEP = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB
"""Segments for small requests; for requests below ``MEDIUM_BYTES``; step by which larger segments are rounded."""


@dataclass(eq=False, slots=True)
class Block:
    """A block of a segment, free or not, between its neighbours there."""

    num_bytes: int
    number: int
    is_small: bool
    is_free: bool = False
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def key(self) -> tuple[int, int]:
        """The order in which free blocks are taken."""
        return self.num_bytes, self.number


class DryAllocator:
    """Attributes: ``reserved_bytes``, the sum of all segments. Only ``release_cached`` gives some back."""

    def __init__(self, expandable: bool = False) -> None:
        self.reserved_bytes = 0
        self._is_expandable = expandable
        self._last: list[Block | None] = [None, None]  # of the expandable segments
        self._num_blocks = 0
        self._free: tuple[list[Block], list[Block]] = ([], [])

    def allocate(self, num_bytes: int) -> Block:
        """Return a block of at least ``num_bytes``."""
        num_bytes = max(ALIGNMENT_BYTES, _rounded(num_bytes, ALIGNMENT_BYTES))
        is_small = num_bytes <= SMALL_BYTES
        free = self._free[is_small]
        found = bisect_left(free, (num_bytes, -1), key=lambda block: block.key)
        # The last block of a segment that grows counts as large as it can become.
        if self._is_expandable and found + 1 < len(free) and free[found] is self._last[is_small]:
            found += 1
        block = free.pop(found) if found < len(free) else self._segment(num_bytes, is_small)
        block.is_free = False
        rest = block.num_bytes - num_bytes
        if rest >= ALIGNMENT_BYTES if is_small or self._is_expandable else rest > SMALL_BYTES:
            block.num_bytes = num_bytes
            other = self._block(rest, is_small)
            other.before, other.after, block.after = block, block.after, other
            if other.after is not None:
                other.after.before = other
            elif self._is_expandable:
                self._last[is_small] = other
            self._add(other)
        return block

    def free(self, block: Block) -> None:
        """Take ``block`` back."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._free[block.is_small].remove(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                first.num_bytes += second.num_bytes
                first.after = second.after
                if first.after is not None:
                    first.after.before = first
                elif self._is_expandable:
                    self._last[block.is_small] = first
                block = first
        self._add(block)

    def release_cached(self) -> None:
        """Give back the segments in which nothing is in use. Those that expand give back all that is not."""
        for is_small, free in enumerate(self._free):
            gone = [one for one in free if self._is_expandable or (one.before is None and one.after is None)]
            self.reserved_bytes -= sum(block.num_bytes for block in gone)
            free[:] = [] if self._is_expandable else [one for one in free if one.before or one.after]
            for block in gone:  # its addresses are free for whatever comes
                if block.before is not None:
                    block.before.after = block.after
                if block.after is not None:
                    block.after.before = block.before
                elif self._is_expandable:
                    self._last[is_small] = block.before

    def _segment(self, num_bytes: int, is_small: bool) -> Block:
        if self._is_expandable:
            return self._expanded(num_bytes, is_small)
        size = SMALL_SEGMENT if is_small else MEDIUM_SEGMENT
        if num_bytes >= MEDIUM_BYTES:
            size = _rounded(num_bytes, SEGMENT_STEP)
        self.reserved_bytes += size
        return self._block(size, is_small)

    def _expanded(self, num_bytes: int, is_small: bool) -> Block:
        """Let the segment grow until its last block, if it is free, or a new one behind it has ``num_bytes``."""
        last = self._last[is_small]
        if last is not None and last.is_free:
            self._free[is_small].remove(last)
            block = last
        else:
            block = self._block(0, is_small)
            block.before = last
            if last is not None:
                last.after = block
        more_bytes = _rounded(num_bytes - block.num_bytes, SMALL_SEGMENT if is_small else MEDIUM_SEGMENT)
        block.num_bytes += more_bytes
        self.reserved_bytes += more_bytes
        self._last[is_small] = block
        return block

    def _block(self, num_bytes: int, is_small: bool) -> Block:
        self._num_blocks += 1
        return Block(num_bytes, self._num_blocks, is_small)

    def _add(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], block, key=lambda one: one.key)


def _rounded(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step
