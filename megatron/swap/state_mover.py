"""Copies optimizer state between device and host memory: owns two copy streams, and says who waits for what.

Buffers belong to the compute stream: the H2D stream waits for it before it fills one (the block may be recycled), and
compute waits for the copy out before it hands the memory on. What a step brings in, an earlier one has taken out and
released: so the H2D stream has waited for that copy as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.swap.devices.base import Device, Event
from megatron.swap.host_arena import HostArena
from megatron.swap.resting import MAIN, Home, Member, Piece, nothing

ALIGNMENT_BYTES = 512
"""Of tensors in a buffer, as the caching allocator aligns its own."""


@dataclass(eq=False)
class Bucket:
    """Pieces that are on the device, or on their way: the tensors of each by name, flat, on one buffer."""

    tensors: dict[Piece, dict[str, torch.Tensor]]
    buffer: torch.Tensor
    event: Event


class StateMover:
    """Brings pieces in and takes them out.

    Args:
        device: whose streams copy.
        arena: where state rests.

    Attributes:
        out_bytes, in_bytes: copied so far.
    """

    def __init__(self, device: Device, arena: HostArena) -> None:
        self._device = device
        self._arena = arena
        self._in_stream = device.copy_stream("in")
        self._out_stream = device.copy_stream("out")
        self._going: deque[tuple[list[torch.Tensor], Event]] = deque()
        self.out_bytes = self.in_bytes = 0

    def born(self, param: torch.Tensor) -> Member:
        """``param`` was just made, and nobody else knows its memory: from now on it rests."""
        member = Member(param, 0)
        home = self.home(member, MAIN, param.dtype)
        source = as_bytes(param)
        self.take_out([(home.room, source)], [])
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
        rooms = self._arena.take_all([member.param.numel() * dtype.itemsize for member, _, dtype in wanted])
        for (member, name, dtype), room in zip(wanted, rooms, strict=True):
            member.homes[name] = Home(member.param if name == MAIN else nothing(member.param, dtype), room)

    def bring_in(self, pieces: Sequence[Piece]) -> Bucket:
        """Enqueue the copies of all that is at home of ``pieces``."""
        places: list[tuple[Piece, str, Home, int]] = []
        end_bytes = 0
        for piece in pieces:
            for name, home in piece.at_home():
                places.append((piece, name, home, end_bytes))
                end_bytes += -(-piece.room(home).numel() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        buffer = self._device.allocate(end_bytes)
        tensors: dict[Piece, dict[str, torch.Tensor]] = {piece: {} for piece in pieces}
        targets, sources = [], []
        for piece, name, home, offset in places:
            sources.append(piece.room(home))
            targets.append(buffer[offset : offset + sources[-1].numel()])
            tensors[piece][name] = targets[-1].view(home.dtype)
        self._device.wait(self._in_stream, self._device.record(self._device.current_stream()))
        self._device.copy(self._in_stream, targets, sources)
        self.in_bytes += sum(source.numel() for source in sources)
        return Bucket(tensors, buffer, self._device.record(self._in_stream))

    def arrive(self, bucket: Bucket) -> None:
        """Compute waits for the copies of ``bucket``."""
        self._device.wait(self._device.current_stream(), bucket.event)

    def take_out(self, moves: Sequence[tuple[torch.Tensor, torch.Tensor]], held: Sequence[torch.Tensor]) -> None:
        """Enqueue copies to host memory (target, source; uint8). The sources and ``held`` live until ``release``."""
        sources = [source for _, source in moves]
        self._device.wait(self._out_stream, self._device.record(self._device.current_stream()))
        self._device.copy(self._out_stream, [room for room, _ in moves], sources)
        self.out_bytes += sum(source.numel() for source in sources)
        self._going.append(([*held, *sources], self._device.record(self._out_stream)))

    def release(self, num_left: int) -> None:
        """Let go of what goes out, the last ``num_left`` aside: compute waits for the copies, and has the memory."""
        while len(self._going) > num_left:
            held, event = self._going.popleft()
            self._device.wait(self._device.current_stream(), event)
            for tensor in held:
                self._device.discard(tensor.untyped_storage())

    def synchronize(self) -> None:
        """Wait for every copy: what is at home is what was stepped last."""
        self.release(0)
        self._device.synchronize()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, flat; a copy where it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
