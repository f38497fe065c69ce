"""Between disk and device: pinned buffers in turn, filled by reads that run ahead, emptied by writes that run behind.

A buffer is used again when its last copy or its last write is over; only then does the calling thread wait. What is
still in a buffer for writes is read from there, whether it has been written yet or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

import torch

from megatron.swap.devices.base import Device, Event, Stream
from megatron.swap.disk_file import BLOCK_BYTES, DiskFile, DiskRoom, padded

NUM_AHEAD = 3
"""Buckets that are read before they are wanted, and as many that are still being written."""
NUM_STAGED = 2 * NUM_AHEAD + 1
"""And the one that was read and is stepped: so many buffers."""

DiskSpan = tuple[DiskRoom, int, int]
"""Bytes from, to (the first of a block each, or the room's end) of a room."""


class _Buffer:
    """Memory, what has to be over before it is used again, and who counts on what it holds.

    Attributes:
        content: of a buffer for writes: the bytes of each span, without padding, once ``event`` has passed.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.busy: list[Callable[[], object]] = []
        self.readers: list[Fetched] = []
        self.content: dict[DiskSpan, torch.Tensor] = {}
        self.event: Event | None = None

    def wait(self) -> None:
        while self.busy:
            self.busy.pop()()

    def use_again(self) -> None:
        self.wait()
        for reader in self.readers:
            reader.is_lost = True
        self.readers, self.content, self.event = [], {}, None


class Fetched:
    """Bytes of some spans that are on their way from disk; ``parts``: where each span's are, once ``arrived``.

    ``is_lost``: a buffer of theirs has others now. Whoever asks for more at once than ``NUM_AHEAD`` asks again.
    """

    def __init__(self, parts: list[torch.Tensor], reads: list[Future[None]], buffers: Sequence[_Buffer]) -> None:
        self.parts = parts
        self.is_lost = False
        self._reads = reads
        self._buffers = buffers
        for buffer in buffers:
            buffer.readers.append(self)

    @property
    def has_arrived(self) -> bool:
        return all(read.done() for read in self._reads)

    def arrived(self, device: Device, stream: Stream) -> list[torch.Tensor]:
        """Wait until they are read, and let ``stream`` wait for what has yet to come from the device. Raises
        ``DiskError``."""
        for read in self._reads:
            read.result()
        for buffer in self._buffers:
            if buffer.event is not None:
                device.wait(stream, buffer.event)
        return self.parts

    def copied(self, device: Device, event: Event) -> None:
        """Whoever needs them has them when ``event`` has passed."""
        for buffer in self._buffers:
            buffer.busy.append(lambda: device.finish(event))


class Staging:
    """The buffers.

    Args:
        disk: where spans are.
        take: pinned host memory, for good; whole pages.
        buffer_bytes: most that is wanted at once, up to the ends of its blocks.
    """

    def __init__(self, disk: DiskFile, take: Callable[[int], torch.Tensor], buffer_bytes: int) -> None:
        self.disk = disk
        buffer_bytes = with_ends(buffer_bytes)
        self._for_reads = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD + 1)]
        self._for_writes = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD)]
        self._writes: dict[DiskRoom, list[tuple[int, int, list[Future[None]]]]] = {}

    def fetch(self, spans: Sequence[DiskSpan]) -> Fetched:
        """Begin to read ``spans``."""
        held = [next((one for one in self._for_writes if span in one.content), None) for span in spans]
        from_disk = [span for span, buffer in zip(spans, held, strict=True) if buffer is None]
        buffers = {id(buffer): buffer for buffer in held if buffer is not None}
        reads: list[Future[None]] = []
        read: Iterator[torch.Tensor] = iter(())
        if from_disk:
            buffer, parts = self._next(self._for_reads, from_disk)
            for (room, start, stop), part in zip(from_disk, parts, strict=True):
                self._written(room, start, stop)
                reads += self.disk.read(room, start, part)
            buffer.busy += [one.exception for one in reads]
            buffers[id(buffer)] = buffer
            read = iter(_without_padding(from_disk, parts))
        parts = [next(read) if one is None else one.content[span] for span, one in zip(spans, held, strict=True)]
        return Fetched(parts, reads, list(buffers.values()))

    def stage(self, spans: Sequence[DiskSpan]) -> tuple[list[torch.Tensor], Callable[[Device, Event], None]]:
        """Memory for the bytes of ``spans``, and what to call once they are on their way there: they are written when
        the event has passed. Nobody waits for that here."""
        buffer, parts = self._next(self._for_writes, spans)
        for room, start, stop in spans:
            self._written(room, start, stop)  # of two writes of the same bytes the later one counts
        for other in self._for_writes:
            other.content = {span: part for span, part in other.content.items() if not _overlaps(span, spans)}

        def write(device: Device, event: Event) -> None:
            buffer.event = event
            buffer.content = dict(zip(spans, _without_padding(spans, parts), strict=True))
            for (room, start, stop), part in zip(spans, parts, strict=True):
                writes = self.disk.write(room, start, part, lambda: device.finish(event))
                self._writes.setdefault(room, []).append((start, stop, writes))
                buffer.busy += [one.result for one in writes]

        return _without_padding(spans, parts), write

    def _next(self, buffers: list[_Buffer], spans: Sequence[DiskSpan]) -> tuple[_Buffer, list[torch.Tensor]]:
        buffer = buffers.pop(0)
        buffers.append(buffer)
        buffer.use_again()
        sizes = [padded(stop - start) for _, start, stop in spans]
        assert sum(sizes) <= buffer.memory.numel(), "more than a bucket at once"
        return buffer, list(buffer.memory[: sum(sizes)].split(sizes))

    def _written(self, room: DiskRoom, start: int, stop: int) -> None:
        """Wait for the writes that are under way there."""
        of_room = self._writes.get(room, [])
        for first, last, writes in of_room:
            if first < stop and start < last:
                for write in writes:
                    write.result()
        of_room[:] = [one for one in of_room if not all(write.done() and write.exception() is None for write in one[2])]

    def synchronize(self) -> None:
        """Every write is over, and the next reads are from disk: it may be changed now. Raises ``DiskError``, again
        each time after a write has failed."""
        writes = [write for spans in self._writes.values() for _, _, of_span in spans for write in of_span]
        wait(writes)  # all of them, also where one has failed
        for write in writes:
            write.result()
        self._writes.clear()
        for buffer in (*self._for_reads, *self._for_writes):
            buffer.wait()
            buffer.content = {}


def with_ends(buffer_bytes: int) -> int:
    """Of a buffer for so many bytes: a slice of a parameter is in several places, whose last blocks are not counted."""
    return padded(buffer_bytes) + 16 * BLOCK_BYTES


def _overlaps(span: DiskSpan, others: Sequence[DiskSpan]) -> bool:
    room, start, stop = span
    return any(room is other and first < stop and start < last for other, first, last in others)


def _without_padding(spans: Sequence[DiskSpan], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part[: stop - start] for (_, start, stop), part in zip(spans, parts, strict=True)]
