"""Copies optimizer state between device, host memory and disk: owns two copy streams, and says who waits for what.

Buffers belong to the compute stream: the H2D stream waits for it before it fills one (the block may be recycled), and
compute waits for the copy out before it hands the memory on. What is brought in while it is still on its way home is
released first: so the H2D stream has waited for that copy as well. What is on disk passes through pinned buffers
(``staging.py``): the host waits for reads before it enqueues their copies, and for nothing on the way out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from megatron.swap.devices.base import Device, Event, Mark
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

    @property
    def is_at_hand(self) -> bool:
        """Whether nobody has to wait for the disk."""
        return self.fetched is None or self.fetched.has_arrived

    @property
    def num_bytes(self) -> int:
        """Of all that rests of them, also of what the optimizer makes in its first step."""
        spans = (piece.span(home) for piece in self.pieces for home in piece.member.homes.values())
        return sum(_aligned(stop - start) for _, start, stop in spans)


class StateMover:
    """Brings pieces in and takes them out.

    Args:
        device: whose streams copy.
        arena: where state rests.
        disk: where the rest of it does.
        bucket_bytes: most that comes at once, what is on disk up to the ends of its blocks.

    Attributes:
        out_bytes, in_bytes: copied so far.
        num_ahead: buckets that may be asked for before the first of them is brought in.
        held_bytes: device memory of what came in and was not released yet.
        disk_bytes: taken on disk.
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
        self._going: deque[tuple[list[torch.UntypedStorage], Event, Iterable[Piece]]] = deque()
        self._going_pieces: set[Piece] = set()
        self.num_ahead = 1 if disk is None else NUM_AHEAD
        self.out_bytes = self.in_bytes = self.held_bytes = self.disk_bytes = 0

    def mark(self) -> Mark:
        """A moment of the stream that computes."""
        return self._device.mark()

    def born(self, param: torch.Tensor) -> Member:
        """``param`` was just made, and nobody else knows its memory: from now on it rests."""
        member = Member(param, 0)
        home = self.home(member, MAIN, param.dtype)
        source = as_bytes(param)
        bounds = [*range(0, home.num_bytes, self._bucket_bytes), home.num_bytes]
        self.take_out([((home, start, stop), source[start:stop]) for start, stop in pairwise(bounds)])
        home.hide()
        self.release()
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
            self.disk_bytes += sum(map(padded, sizes[num_here:]))
        for (member, name, dtype), room in zip(wanted, rooms, strict=True):
            member.homes[name] = Home(member.param if name == MAIN else nothing(member.param, dtype), room)

    def fetch(self, pieces: Sequence[Piece]) -> Coming:
        """They are next: begin to read what of them is on disk."""
        spans = _on_disk(piece.span(home) for piece in pieces for _, home in piece.at_home())
        return Coming(pieces, self._staging.fetch(spans) if spans and self._staging else None)

    def bring_in(self, coming: Coming, *, is_ahead: bool = False) -> Bucket | None:
        """Enqueue the copies of all that is at home of its pieces; ``is_ahead``: ``None`` where memory is short."""
        if not self._going_pieces.isdisjoint(coming.pieces):
            self.release()
        if coming.fetched is not None and coming.fetched.is_lost:  # several optimizers read ahead
            coming = self.fetch(coming.pieces)
        places: list[tuple[Piece, str, Span, int]] = []
        end_bytes = 0
        for piece in coming.pieces:
            for name, home in piece.at_home():
                span = piece.span(home)
                places.append((piece, name, span, end_bytes))
                end_bytes += _aligned(span[2] - span[1])
        buffer = self._device.allocate_if_free(end_bytes) if is_ahead else self._device.allocate(end_bytes)
        if buffer is None:
            return None
        self.held_bytes += end_bytes
        tensors: dict[Piece, dict[str, torch.Tensor]] = {piece: {} for piece in coming.pieces}
        read = iter(coming.fetched.arrived(self._device, self._in_stream) if coming.fetched is not None else ())
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

    def bring_whole(self, member: Member) -> dict[str, torch.Tensor]:
        """All that is at home of ``member``, each in memory of its own; compute waits."""
        whole: dict[str, torch.Tensor] = {}
        for piece in member.pieces:
            bucket = self.bring_in(self.fetch([piece]))
            assert bucket is not None
            self.arrive(bucket)
            for name, part in bucket.tensors[piece].items():
                home = member.homes[name]
                if name not in whole:
                    whole[name] = self._device.allocate(home.num_bytes).view(home.dtype)
                whole[name][piece.start : piece.stop].copy_(part)
            self.put_back(bucket)
        return whole

    def put_back(self, bucket: Bucket) -> None:
        """It is not wanted after all."""
        self.arrive(bucket)  # its memory is free for compute when nothing is written there any more
        self._let_go(bucket.buffer.untyped_storage())

    def take_out(self, moves: Sequence[tuple[Span, torch.Tensor]], bucket: Bucket | None = None) -> None:
        """Enqueue copies home of bytes (uint8). The sources and the buffer of ``bucket`` live until ``release``."""
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
        self.out_bytes += sum(source.numel() for _, source in moves)
        if event is not None:
            held = {storage.data_ptr(): storage for storage in (source.untyped_storage() for _, source in moves)}
            if bucket is not None:
                held.pop(bucket.buffer.data_ptr(), None)
            self.held_bytes += sum(storage.nbytes() for storage in held.values())
            buffers = [] if bucket is None else [bucket.buffer.untyped_storage()]
            pieces = [] if bucket is None else list(bucket.tensors)
            self._going.append(([*held.values(), *buffers], event, pieces))
            self._going_pieces.update(pieces)

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

    @property
    def going_bytes(self) -> int:
        """Device memory of what is on its way home."""
        return sum(storage.nbytes() for held, _, _ in self._going for storage in held)

    @property
    def loaded_bytes(self) -> int:
        """Device memory of what has come in and is not on its way home yet."""
        return self.held_bytes - self.going_bytes

    def release(self, most_bytes: int = 0) -> None:
        """Let go of what goes out, the oldest first, until it holds ``most_bytes``: compute waits for the copies, and
        has the memory."""
        going_bytes = self.going_bytes
        while self._going and going_bytes > most_bytes:
            held, event, pieces = self._going.popleft()
            self._device.wait(self._device.current_stream(), event)
            self._going_pieces.difference_update(pieces)
            for storage in held:
                going_bytes -= storage.nbytes()
                self._let_go(storage)

    def _let_go(self, storage: torch.UntypedStorage) -> None:
        self.held_bytes -= storage.nbytes()
        self._device.discard(storage)

    def synchronize(self) -> None:
        """Wait for every copy and every write: what is at home is what was stepped last. Raises ``DiskError``."""
        self.release()
        self._device.synchronize()
        if self._staging is not None:
            self._staging.synchronize()


def _on_disk(spans: Iterable[Span]) -> list[DiskSpan]:
    return [(home.room, start, stop) for home, start, stop in spans if isinstance(home.room, DiskRoom)]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat; a copy where it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
