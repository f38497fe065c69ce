"""Pinned buffers between disk and device, used in turn. Reads fill them ahead of use; writes empty them afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

import torch

from megatron.swap.common.disk_buffers import NUM_AHEAD, with_padding
from megatron.swap.devices.base import Device, Event, Stream
from megatron.swap.memory.disk_file import DiskFile, DiskRoom, padded

# A room, with the first and the end of the span's bytes: multiples of BLOCK_BYTES, or the room's end.
DiskSpan = tuple[DiskRoom, int, int]


class _Buffer:
    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # uint8, pinned
        self.busy: list[Callable[[], object]] = []  # each waits for a copy, read or write that uses the memory
        self.readers: list[Fetched] = []  # the fetches whose bytes are in the memory
        # In a buffer for writes: the bytes of each span without padding, valid once `event` has passed.
        self.content: dict[DiskSpan, torch.Tensor] = {}
        self.event: Event | None = None  # passes when the bytes have arrived from the device

    def wait(self) -> None:
        """Wait until no copy, read or write uses the memory."""
        while self.busy:
            self.busy.pop()()

    def reuse(self) -> None:
        """Wait, on the calling thread, until nothing uses the memory. Mark the bytes of all readers as lost."""
        self.wait()
        for reader in self.readers:
            reader.is_lost = True
        self.readers, self.content, self.event = [], {}, None


class Fetched:
    """The bytes of some spans that are being read from disk. ``Staging.fetch`` makes them."""

    def __init__(self, chunks: list[torch.Tensor], reads: list[Future[None]], buffers: Sequence[_Buffer]) -> None:
        self.chunks = chunks  # one uint8 tensor a span, valid once `arrived`
        # A buffer was reused, so the spans must be fetched again. More than NUM_AHEAD open fetches lead to this.
        self.is_lost = False
        self._reads = reads
        self._buffers = buffers
        for buffer in buffers:
            buffer.readers.append(self)

    @property
    def has_arrived(self) -> bool:
        return all(read.done() for read in self._reads)

    def arrived(self, device: Device, stream: Stream) -> list[torch.Tensor]:
        """Wait for the reads, let ``stream`` wait for the buffers, and return chunks, or raise a ``DiskError``."""
        for read in self._reads:
            read.result()  # the calling thread waits for the disk
        for buffer in self._buffers:
            if buffer.event is not None:
                device.wait(stream, buffer.event)  # bytes may be on their way from the device to a buffer for writes
        return self.chunks

    def copied(self, device: Device, event: Event) -> None:
        """Keep the buffers until ``event`` has passed, which is behind the last copy out of the chunks."""
        for buffer in self._buffers:
            buffer.busy.append(lambda: device.finish(event))  # waits when the buffer is reused, not now


class Staging:
    """All buffers of one user of ``disk``. Not thread-safe.

    ``take`` allocates pinned host memory in whole pages, which the buffers keep: for ``buffer_bytes`` in whole blocks,
    the most of one ``fetch`` or ``stage``.
    """

    def __init__(self, disk: DiskFile, take: Callable[[int], torch.Tensor], buffer_bytes: int) -> None:
        self.disk = disk
        buffer_bytes = with_padding(buffer_bytes)
        self._for_reads = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD + 1)]
        self._for_writes = [_Buffer(take(buffer_bytes)) for _ in range(NUM_AHEAD)]
        self._writes: dict[DiskRoom, list[tuple[int, int, list[Future[None]]]]] = {}

    def fetch(self, spans: Sequence[DiskSpan]) -> Fetched:
        """Begin to read ``spans``, which must fit one buffer."""
        # The bytes of the last writes are still in their buffers, and are not read again.
        cached = [next((one for one in self._for_writes if span in one.content), None) for span in spans]
        from_disk = [span for span, buffer in zip(spans, cached, strict=True) if buffer is None]
        buffers = {id(buffer): buffer for buffer in cached if buffer is not None}
        reads: list[Future[None]] = []
        read: Iterator[torch.Tensor] = iter(())
        if from_disk:
            buffer, chunks = self._next(self._for_reads, from_disk)
            for (room, start, stop), chunk in zip(from_disk, chunks, strict=True):
                self._wait_for_writes(room, start, stop)  # so that no read overtakes a write of the same bytes
                reads += self.disk.read(room, start, chunk)
            buffer.busy += [one.exception for one in reads]
            buffers[id(buffer)] = buffer
            read = iter(_without_padding(from_disk, chunks))
        chunks = [next(read) if one is None else one.content[span] for span, one in zip(spans, cached, strict=True)]
        return Fetched(chunks, reads, list(buffers.values()))

    def stage(self, spans: Sequence[DiskSpan]) -> tuple[list[torch.Tensor], Callable[[Device, Event], None]]:
        """Return memory for the bytes of ``spans``, and a function to call once the copies into it are enqueued.

        The function takes the device and the event behind those copies, and returns at once. Other threads write the
        bytes to disk when the event has passed. Raises a ``DiskError`` if an earlier write of the same bytes failed.
        """
        buffer, chunks = self._next(self._for_writes, spans)
        for room, start, stop in spans:
            self._wait_for_writes(room, start, stop)  # so that the later write of the same bytes wins
        for other in self._for_writes:  # their bytes of these spans are old
            other.content = {span: chunk for span, chunk in other.content.items() if not _overlaps(span, spans)}

        def write(device: Device, event: Event) -> None:
            buffer.event = event
            buffer.content = dict(zip(spans, _without_padding(spans, chunks), strict=True))
            for (room, start, stop), chunk in zip(spans, chunks, strict=True):
                # The writing threads wait for the event, not the caller.
                writes = self.disk.write(room, start, chunk, lambda: device.finish(event))
                self._writes.setdefault(room, []).append((start, stop, writes))
                buffer.busy += [one.result for one in writes]

        return _without_padding(spans, chunks), write

    def _next(self, buffers: list[_Buffer], spans: Sequence[DiskSpan]) -> tuple[_Buffer, list[torch.Tensor]]:
        buffer = buffers.pop(0)
        buffers.append(buffer)
        buffer.reuse()  # waits for the oldest copies, reads and writes only
        sizes = [padded(stop - start) for _, start, stop in spans]
        assert sum(sizes) <= buffer.memory.numel(), "more than a buffer at once"
        return buffer, list(buffer.memory[: sum(sizes)].split(sizes))

    def _wait_for_writes(self, room: DiskRoom, start: int, stop: int) -> None:
        """Wait for the writes under way that touch these bytes, and forget writes that are over."""
        of_room = self._writes.get(room, [])
        for first, last, writes in of_room:
            if first < stop and start < last:
                for write in writes:
                    write.result()
        of_room[:] = [one for one in of_room if not all(write.done() and write.exception() is None for write in one[2])]

    def synchronize(self) -> None:
        """Wait for every write, so that later reads are from disk. Raises a ``DiskError`` if one has failed."""
        writes = [write for spans in self._writes.values() for _, _, of_span in spans for write in of_span]
        wait(writes)  # for all of them, even if one has failed
        for write in writes:
            write.result()
        self._writes.clear()
        for buffer in (*self._for_reads, *self._for_writes):
            buffer.wait()
            buffer.content = {}


def _overlaps(span: DiskSpan, others: Sequence[DiskSpan]) -> bool:
    room, start, stop = span
    return any(room is other and first < stop and start < last for other, first, last in others)


def _without_padding(spans: Sequence[DiskSpan], chunks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [chunk[: stop - start] for (_, start, stop), chunk in zip(spans, chunks, strict=True)]
