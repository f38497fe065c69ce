"""Between disk and device: pinned buffers in turn, filled by reads that run ahead, emptied by writes that run behind.

A buffer is used again when its last copy or its last write is over; only then does the calling thread wait. A read
waits for the last write of the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from megatron.swap.devices.base import Device, Event
from megatron.swap.disk_file import BLOCK_BYTES, DiskFile, DiskRoom, padded

NUM_AHEAD = 3
"""Buckets that are read before they are wanted, and as many that are still being written."""
NUM_STAGED = 2 * NUM_AHEAD + 1
"""And the one that was read and is stepped: so many buffers."""

DiskSpan = tuple[DiskRoom, int, int]
"""Bytes from, to (the first of a block each, or the room's end) of a room."""


class _Buffer:
    """Memory, and what has to be over before it is used again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.busy: list[Callable[[], object]] = []
        self.holds: Fetched | None = None

    def wait(self) -> None:
        while self.busy:
            self.busy.pop()()


class Fetched:
    """Bytes of some spans that are on their way from disk; ``parts``: where each span's are, once ``arrived``.

    ``is_lost``: their buffer has others now. Whoever asks for more at once than ``NUM_AHEAD`` asks again for those.
    """

    def __init__(self, buffer: _Buffer, parts: list[torch.Tensor], reads: list[Future[None]]) -> None:
        self.parts = parts
        self.is_lost = False
        self._buffer = buffer
        self._reads = reads
        if buffer.holds is not None:
            buffer.holds.is_lost = True
        buffer.holds = self

    @property
    def has_arrived(self) -> bool:
        return all(read.done() for read in self._reads)

    def arrived(self) -> list[torch.Tensor]:
        """Wait until they are there. Raises ``DiskError``."""
        for read in self._reads:
            read.result()
        return self.parts

    def copied(self, device: Device, event: Event) -> None:
        """Whoever needs them has them when ``event`` has passed."""
        self._buffer.busy.append(lambda: device.finish(event))


class Staging:
    """The buffers.

    Args:
        disk: where spans are.
        take: pinned host memory, for good; whole pages.
        buffer_bytes: most that is wanted at once, up to the ends of its blocks.
    """

    def __init__(self, disk: DiskFile, take: Callable[[int], torch.Tensor], buffer_bytes: int) -> None:
        self.disk = disk
        buffer_bytes = padded(buffer_bytes) + 16 * BLOCK_BYTES  # a slice of a parameter alone: its ends are not counted
        self._for_reads = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD + 1)]
        self._for_writes = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD)]
        self._writes: dict[DiskRoom, list[tuple[int, int, list[Future[None]]]]] = {}

    def fetch(self, spans: Sequence[DiskSpan]) -> Fetched:
        """Begin to read ``spans``."""
        buffer, parts = self._next(self._for_reads, spans)
        reads = []
        for (room, start, stop), part in zip(spans, parts, strict=True):
            self._written(room, start, stop)
            reads += self.disk.read(room, start, part)
        buffer.busy += [read.exception for read in reads]
        return Fetched(buffer, _without_padding(spans, parts), reads)

    def stage(self, spans: Sequence[DiskSpan]) -> tuple[list[torch.Tensor], Callable[[Device, Event], None]]:
        """Memory for the bytes of ``spans``, and what to call once they are on their way there: they are written when
        the event has passed. Nobody waits for that here."""
        buffer, parts = self._next(self._for_writes, spans)

        def write(device: Device, event: Event) -> None:
            for (room, start, stop), part in zip(spans, parts, strict=True):
                writes = self.disk.write(room, start, part, lambda: device.finish(event))
                self._writes.setdefault(room, []).append((start, stop, writes))
                buffer.busy += [one.result for one in writes]

        return _without_padding(spans, parts), write

    def _next(self, buffers: list[_Buffer], spans: Sequence[DiskSpan]) -> tuple[_Buffer, list[torch.Tensor]]:
        buffer = buffers.pop(0)
        buffers.append(buffer)
        buffer.wait()
        sizes = [padded(stop - start) for _, start, stop in spans]
        assert sum(sizes) <= buffer.memory.numel(), "more than a bucket at once"
        return buffer, list(buffer.memory[: sum(sizes)].split(sizes))

    def _written(self, room: DiskRoom, start: int, stop: int) -> None:
        """Wait for the writes that are under way there."""
        under_way = []
        for first, last, writes in self._writes.pop(room, ()):
            if first < stop and start < last:
                for write in writes:
                    write.result()
            elif not all(write.done() and write.exception() is None for write in writes):
                under_way.append((first, last, writes))
        if under_way:
            self._writes[room] = under_way

    def synchronize(self) -> None:
        """Every write is over. Raises ``DiskError``, again each time after one has failed."""
        for room in list(self._writes):
            for _, _, writes in self._writes[room]:
                for write in writes:
                    write.result()
            del self._writes[room]
        for buffer in (*self._for_reads, *self._for_writes):
            buffer.wait()


def _without_padding(spans: Sequence[DiskSpan], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part[: stop - start] for (_, start, stop), part in zip(spans, parts, strict=True)]
