"""What of an optimizer rests in host memory or on disk, and in which pieces it comes and goes.

While a tensor rests its object stays where everybody has it, with all of its shape on one element of memory that is not
a number: reading it gives NaN, copying to it is an error, and neither is an illegal access.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.swap.disk_file import BLOCK_BYTES, DiskRoom, padded

ALIGNED = 128
"""Elements: slices begin at a multiple, as kernels like it."""
MAIN = "main"
"""The name of a parameter's own values among what rests of it."""


class Home:
    """Where a tensor rests.

    Args:
        tensor: the object that everybody knows.
        room: its bytes in host memory (uint8), or where on disk they are.
    """

    def __init__(self, tensor: torch.Tensor, room: torch.Tensor | DiskRoom) -> None:
        self.tensor = tensor
        self.room = room
        self.num_bytes = room.num_bytes if isinstance(room, DiskRoom) else room.numel()
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def hide(self) -> None:
        """The object has its shape and its device, and no memory to speak of."""
        self.tensor.data = nothing(self, self.dtype)

    def show(self) -> None:
        """The object *is* that memory, until it is hidden again: a checkpoint may read it or write to it. What is on
        disk comes when it is touched."""
        data = self.room.view() if isinstance(self.room, DiskRoom) else self.room
        self.tensor.data = data.view(self.dtype).view(self.shape)


Span = tuple[Home, int, int]
"""Bytes from, to of what is at home there."""


@dataclass(eq=False)
class Member:
    """A parameter whose state rests.

    Attributes:
        param: as the optimizer has it.
        group: index of its group.
        homes: of what is as large as the parameter, by name; ``MAIN`` is the parameter itself, if it rests too.
        pieces: slices of it, in order.
    """

    param: torch.Tensor
    group: int
    homes: dict[str, Home] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def element_bytes(self) -> int:
        """Of all that rests, for one element of the parameter."""
        return sum(home.dtype.itemsize for home in self.homes.values())

    @property
    def disk_bytes(self) -> int:
        """Of all that rests, on disk."""
        return sum(home.num_bytes for home in self.homes.values() if isinstance(home.room, DiskRoom))

    @property
    def num_aligned(self) -> int:
        """Slices begin at a multiple of so many elements; of what is on disk at a block."""
        return BLOCK_BYTES if self.disk_bytes else ALIGNED


@dataclass(eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter.

    Attributes:
        has_state: the optimizer has stepped it, or its state was loaded; until then there is room for it alone.
        state: what of its state is not as large: that stays.
    """

    member: Member
    start: int
    stop: int
    has_state: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all that rests of it, each up to the end of a block."""
        return sum(padded((self.stop - self.start) * home.dtype.itemsize) for home in self.member.homes.values())

    def at_home(self) -> list[tuple[str, Home]]:
        """What has to come in for a step."""
        return [(name, home) for name, home in self.member.homes.items() if name == MAIN or self.has_state]

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements of a tensor as large as the parameter."""
        if self.stop - self.start == tensor.numel():
            return tensor.detach()
        return tensor.detach().view(-1)[self.start : self.stop]

    def span(self, home: Home) -> Span:
        """Its bytes at home."""
        size = home.dtype.itemsize
        return home, self.start * size, self.stop * size


def nothing(like: torch.Tensor | Home, dtype: torch.dtype) -> torch.Tensor:
    """As large as ``like``, on its device, on one element that is not a number, or the least one."""
    value = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=like.device).expand(like.shape)
