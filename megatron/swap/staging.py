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

Span = tuple[DiskRoom, int, int]
"""Bytes from, to (the first of a block each, or the room's end) of a room."""


class _Buffer:
    """Memory, and what has to be over before it is used again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.busy: list[Callable[[], object]] = []

    def wait(self) -> None:
        while self.busy:
            self.busy.pop()()


class Fetched:
    """Bytes of some spans that are on their way from disk; ``parts``: where each span's are, once ``arrived``."""

    def __init__(self, buffer: _Buffer, parts: list[torch.Tensor], reads: list[Future[None]]) -> None:
        self.parts = parts
        self._buffer = buffer
        self._reads = reads

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
        buffer_bytes: of a buffer. It grows where more is wanted at once.
    """

    def __init__(self, disk: DiskFile, take: Callable[[int], torch.Tensor], buffer_bytes: int) -> None:
        self.disk = disk
        self._take = take
        buffer_bytes = padded(buffer_bytes + max(buffer_bytes // 64, 16 * BLOCK_BYTES))  # each span ends with its block
        self._for_reads = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD + 1)]
        self._for_writes = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD)]
        self._writes: dict[tuple[DiskRoom, int], list[Future[None]]] = {}

    def fetch(self, spans: Sequence[Span]) -> Fetched:
        """Begin to read ``spans``."""
        buffer, parts = self._next(self._for_reads, spans)
        reads = []
        for (room, start, _), part in zip(spans, parts, strict=True):
            self._written(room, start)
            reads += self.disk.read(room, start, part)
        buffer.busy += [read.exception for read in reads]
        return Fetched(buffer, _without_padding(spans, parts), reads)

    def stage(self, spans: Sequence[Span]) -> tuple[list[torch.Tensor], Callable[[Device, Event], None]]:
        """Memory for the bytes of ``spans``, and what to call once they are on their way there: they are written when
        the event has passed. Nobody waits for that here."""
        buffer, parts = self._next(self._for_writes, spans)

        def write(device: Device, event: Event) -> None:
            for (room, start, _), part in zip(spans, parts, strict=True):
                writes = self._writes[room, start] = self.disk.write(room, start, part, lambda: device.finish(event))
                buffer.busy += [one.result for one in writes]

        return _without_padding(spans, parts), write

    def _next(self, buffers: list[_Buffer], spans: Sequence[Span]) -> tuple[_Buffer, list[torch.Tensor]]:
        buffer = buffers.pop(0)
        buffers.append(buffer)
        buffer.wait()
        sizes = [padded(stop - start) for _, start, stop in spans]
        if sum(sizes) > buffer.memory.numel():
            buffer.memory = self._take(sum(sizes))
        return buffer, list(buffer.memory[: sum(sizes)].split(sizes))

    def _written(self, room: DiskRoom, start: int) -> None:
        for write in self._writes.pop((room, start), ()):
            write.result()

    def synchronize(self) -> None:
        """Every write is over. Raises ``DiskError``."""
        for buffer in (*self._for_reads, *self._for_writes):
            buffer.wait()
        for room, start in list(self._writes):
            self._written(room, start)


def _without_padding(spans: Sequence[Span], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part[: stop - start] for (_, start, stop), part in zip(spans, parts, strict=True)]
