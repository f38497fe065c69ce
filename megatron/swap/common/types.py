"""Vocabulary: the records that every other part speaks in. No torch, no Megatron."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MOST = 1e12
"""Largest number that a flag or a file may give: beyond all that is measured, and small enough to multiply."""


class SwapError(RuntimeError):
    """Base of the errors that this package raises on purpose."""


class UsageError(SwapError, ValueError):
    """A flag or a combination of flags that cannot work; raised before the model is built."""


NORM = "norm"
ACTIVATION = "activation"
ROTARY = "rotary"
"""Queries, keys and values as attention gets them: rotated, and copied out of linear_qkv's output."""
LINEAR = "linear"
"""Outputs of linear_qkv and linear_fc1."""
PRODUCERS = (NORM, ACTIVATION, ROTARY, LINEAR)
"""Kinds of kernels whose outputs can be recomputed."""

FEW_LAYERS = 8
"""In chunks with fewer layers memory is lent storage by storage: ``LayerPosition.early_release``."""
LOSS_ROWS = 1024
"""Tokens whose cross entropy is computed at once: see ``cross_entropy.py``."""


class Action(Enum):
    """What a policy answers for a site."""

    KEEP = auto()
    SWAP = auto()
    RECOMPUTE = auto()
    """Not held: the kernel that made it makes it again from tensors that are saved anyway."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where autograd saved a tensor: the ``ordinal``-th one under ``path`` in layer ``layer`` (0-based).

    ``path`` is the submodule's path inside its layer (``mlp.linear_fc2``), ``layer`` for what the layer itself
    saves, ``checkpoint`` for the input of a recomputed segment that begins with this layer.
    """

    layer: int
    path: str
    ordinal: int

    def __str__(self) -> str:
        return f"layers.{self.layer}/{self.path}/{self.ordinal}"


@dataclass(frozen=True, slots=True)
class LayerPosition:
    """Where a layer stands in the forward of its model chunk.

    Attributes:
        num_after: layers that run after it.
        trailing_layers: how many layers at the very end of the chunk are to be swapped, without a gap.
        ends_in_loss: whether the chunk ends in the loss, so that its last layer is the first of backward.
        swapped: whether it is to be swapped itself.
        num_layers: of the chunk.
    """

    num_after: int
    trailing_layers: int
    ends_in_loss: bool
    swapped: bool = True
    num_layers: int = 1

    @property
    def early_release(self) -> bool:
        """Whether what the layer keeps is lent while it runs, until each storage of it is there; else until it begins.

        Copies gain a layer's time by it, much where there are few layers. But memory that comes back in the middle of a
        layer comes back too late for what the layer asks for next, and the allocator's fragments grow by half a GiB to
        a whole one.
        """
        return self.num_layers < FEW_LAYERS

    def num_trailing_kept(self, window_groups: int) -> int:
        """Layers of the tail that stay after all: they would be called back at once.

        The last one always; before it as many as the window (in groups) would have brought back by then.
        """
        return min(self.trailing_layers, 1 + window_groups) if self.ends_in_loss else 0

    def is_trailing_kept(self, window_groups: int) -> bool:
        return self.num_after < self.num_trailing_kept(window_groups)


def layer_positions(swapped: list[bool], ends_in_loss: bool) -> list[LayerPosition]:
    """The place of each layer of a chunk; ``swapped`` says for each whether it is to be swapped."""
    trailing_layers = next((i for i, flag in enumerate(reversed(swapped)) if not flag), len(swapped))
    last = len(swapped) - 1
    return [
        LayerPosition(last - i, trailing_layers, ends_in_loss, flag, len(swapped)) for i, flag in enumerate(swapped)
    ]


@dataclass(frozen=True, slots=True)
class GroupKey:
    """A layer's run over one micro-batch. ``micro_batch`` counts runs since the graph was last empty."""

    layer: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """What one kind (weights, activations, …) takes on each tier."""

    kind: str
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0


def is_within(least: float, value: object, most: float) -> bool:
    """Whether ``value`` is a number, and from ``least`` to ``most``."""
    return isinstance(value, int | float) and least <= value <= most


def format_bytes(num_bytes: float) -> str:
    """Bytes as a person reads them: ``412 MiB``, ``1.50 GiB``."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= 10 * MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    if num_bytes >= MIB / 10:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes / KIB:.1f} KiB"
