"""Copies optimizer state between device, host memory and disk: owns two copy streams, and says who waits for what.

Buffers belong to the compute stream: the H2D stream waits for it before it fills one (the block may be recycled), and
compute waits for the copy out before it hands the memory on. What a step brings in, an earlier one has taken out and
released: so the H2D stream has waited for that copy as well. What is on disk passes through pinned buffers
(``staging.py``): the host waits for reads before it enqueues their copies, and for nothing on the way out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron.swap.devices.base import Device, Event
from megatron.swap.disk_file import DiskFile, DiskRoom, padded
from megatron.swap.host_arena import HostArena
from megatron.swap.resting import MAIN, Home, Member, Piece, Span, nothing
from megatron.swap.staging import NUM_AHEAD, DiskSpan, Fetched, Staging
from megatron.swap.types import MIB

ALIGNMENT_BYTES = 512
"""Of tensors in a buffer, as the caching allocator aligns its own."""


@dataclass(eq=False)
class Bucket:
    """Pieces that are on the device, or on their way: the tensors of each by name, flat, on one buffer."""

    tensors: dict[Piece, dict[str, torch.Tensor]]
    buffer: torch.Tensor
    event: Event


@dataclass(eq=False)
class Coming:
    """Pieces that are next; what of them is on disk is being read."""

    pieces: Sequence[Piece]
    fetched: Fetched | None


class StateMover:
    """Brings pieces in and takes them out.

    Args:
        device: whose streams copy.
        arena: where state rests.
        disk: where the rest of it does.
        bucket_bytes: most that comes at once, what is on disk up to the ends of its blocks.

    Attributes:
        out_bytes, in_bytes: copied so far.
    """

    def __init__(
        self, device: Device, arena: HostArena, disk: DiskFile | None = None, bucket_bytes: int = 256 * MIB
    ) -> None:
        self._device = device
        self._arena = arena
        self._disk = disk
        self._bucket_bytes = padded(bucket_bytes)
        self._staging = None if disk is None else Staging(disk, arena.take, bucket_bytes)
        self._in_stream = device.copy_stream("in")
        self._out_stream = device.copy_stream("out")
        self._going: deque[tuple[list[torch.Tensor], Event]] = deque()
        self.out_bytes = self.in_bytes = 0

    def born(self, param: torch.Tensor) -> Member:
        """``param`` was just made, and nobody else knows its memory: from now on it rests."""
        member = Member(param, 0)
        home = self.home(member, MAIN, param.dtype)
        source = as_bytes(param)
        bounds = [*range(0, home.num_bytes, self._bucket_bytes), home.num_bytes]
        self.take_out([((home, start, stop), source[start:stop]) for start, stop in pairwise(bounds)], [])
        home.hide()
        self.release(0)
        return member

    def home(self, member: Member, name: str, dtype: torch.dtype) -> Home:
        """Where ``name`` of ``member`` rests; made when it is asked for first."""
        if name not in member.homes:
            self.make_homes([(member, name, dtype)])
        return member.homes[name]

    def make_homes(self, wanted: Sequence[tuple[Member, str, torch.dtype]]) -> None:
        """Room for each name, of its type, for as many elements as the member has."""
        sizes = [member.param.numel() * dtype.itemsize for member, _, dtype in wanted]
        num_here = len(sizes) if self._disk is None else self._arena.num_that_fit(sizes)
        rooms: list[torch.Tensor | DiskRoom] = [*self._arena.take_all(sizes[:num_here])]
        if self._disk is not None:
            rooms += self._disk.take_all(sizes[num_here:])
        for (member, name, dtype), room in zip(wanted, rooms, strict=True):
            member.homes[name] = Home(member.param if name == MAIN else nothing(member.param, dtype), room)

    def ahead(self, buckets: Iterable[Sequence[Piece]]) -> Iterator[Coming]:
        """``buckets``, while what of the next ones is on disk is read."""
        coming: deque[Coming] = deque()
        for pieces in buckets:
            spans = _on_disk(piece.span(home) for piece in pieces for _, home in piece.at_home())
            coming.append(Coming(pieces, self._staging.fetch(spans) if spans and self._staging else None))
            if self._staging is None or len(coming) >= NUM_AHEAD:
                yield coming.popleft()
        yield from coming

    def bring_in(self, coming: Coming) -> Bucket:
        """Enqueue the copies of all that is at home of its pieces."""
        places: list[tuple[Piece, str, Span, int]] = []
        end_bytes = 0
        for piece in coming.pieces:
            for name, home in piece.at_home():
                span = piece.span(home)
                places.append((piece, name, span, end_bytes))
                end_bytes += -(-(span[2] - span[1]) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        buffer = self._device.allocate(end_bytes)
        tensors: dict[Piece, dict[str, torch.Tensor]] = {piece: {} for piece in coming.pieces}
        read = iter(coming.fetched.arrived() if coming.fetched is not None else ())
        targets, sources = [], []
        for piece, name, (home, start, stop), offset in places:
            sources.append(next(read) if isinstance(home.room, DiskRoom) else home.room[start:stop])
            targets.append(buffer[offset : offset + stop - start])
            tensors[piece][name] = targets[-1].view(home.dtype)
        self._device.wait(self._in_stream, self._device.record(self._device.current_stream()))
        self._device.copy(self._in_stream, targets, sources)
        self.in_bytes += sum(source.numel() for source in sources)
        bucket = Bucket(tensors, buffer, self._device.record(self._in_stream))
        if coming.fetched is not None:
            coming.fetched.copied(self._device, bucket.event)
        return bucket

    def arrive(self, bucket: Bucket) -> None:
        """Compute waits for the copies of ``bucket``."""
        self._device.wait(self._device.current_stream(), bucket.event)

    def take_out(self, moves: Sequence[tuple[Span, torch.Tensor]], held: Sequence[torch.Tensor]) -> None:
        """Enqueue copies home of bytes (uint8). The sources and ``held`` live until ``release``."""
        self._device.wait(self._out_stream, self._device.record(self._device.current_stream()))
        event = None
        for batch in self._batches(moves):
            spans = _on_disk(span for span, _ in batch)
            staged, write = self._staging.stage(spans) if spans and self._staging else ([], None)
            parts = iter(staged)
            targets = [
                next(parts) if isinstance(home.room, DiskRoom) else home.room[start:stop]
                for (home, start, stop), _ in batch
            ]
            self._device.copy(self._out_stream, targets, [source for _, source in batch])
            event = self._device.record(self._out_stream)
            if write is not None:
                write(self._device, event)
        sources = [source for _, source in moves]
        self.out_bytes += sum(source.numel() for source in sources)
        if event is not None:  # of the last: what is held may be a part of the same storage
            self._going.append(([*held, *sources], event))

    def _batches(self, moves: Sequence[tuple[Span, torch.Tensor]]) -> Iterator[list[tuple[Span, torch.Tensor]]]:
        """As much at once as a buffer before the disk holds."""
        batch: list[tuple[Span, torch.Tensor]] = []
        batch_bytes = 0
        for (home, start, stop), source in moves:
            num_bytes = padded(stop - start) if isinstance(home.room, DiskRoom) else 0
            if batch and batch_bytes + num_bytes > self._bucket_bytes:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(((home, start, stop), source))
            batch_bytes += num_bytes
        if batch:
            yield batch

    def release(self, num_left: int) -> None:
        """Let go of what goes out, the last ``num_left`` aside: compute waits for the copies, and has the memory."""
        while len(self._going) > num_left:
            held, event = self._going.popleft()
            self._device.wait(self._device.current_stream(), event)
            for tensor in held:
                self._device.discard(tensor.untyped_storage())

    def synchronize(self) -> None:
        """Wait for every copy and every write: what is at home is what was stepped last. Raises ``DiskError``."""
        self.release(0)
        self._device.synchronize()
        if self._staging is not None:
            self._staging.synchronize()


def _on_disk(spans: Iterable[Span]) -> list[DiskSpan]:
    return [(home.room, start, stop) for home, start, stop in spans if isinstance(home.room, DiskRoom)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat; a copy where it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
