"""Types, errors and units that all packages share. No torch, no Megatron."""

from dataclasses import dataclass
from enum import Enum, auto

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

MOST = 1e12  # largest number that a flag or a file may give: above any measured value, and small enough to multiply


class SwapError(RuntimeError):
    """Base class of the errors that this package raises on purpose."""


class UsageError(SwapError, ValueError):
    """A flag, an argument, or a combination of them, that cannot work. Raised before anything is changed."""


NORM = "norm"
ACTIVATION = "activation"
ROTARY = "rotary"  # queries, keys and values as attention receives them: rotated, and copied out of linear_qkv's output
QUANTIZED = "quantized"  # 8-bit values of tensors that exist in bf16, but of a norm's or an activation's output
RESIDUAL = "residual"  # a layer's input plus attention's output, for the second norm; linear_proj runs again for it
LINEAR = "linear"  # outputs of linear_qkv and linear_fc1; in models that Megatron did not build, of all matrix products
PRODUCERS = (NORM, ACTIVATION, ROTARY, QUANTIZED, RESIDUAL, LINEAR)  # kinds of kernels whose outputs can be recomputed
OPERATOR = "operator"  # outputs of single cheap operators, in models that Megatron did not build

FEW_LAYERS = 8  # chunks with fewer layers release memory storage by storage: ``LayerPosition.early_release``
LOSS_ROWS = 1024  # tokens (rows) whose cross entropy is computed at once: ``cross_entropy.py``


class Action(Enum):
    """The decision of a policy for a site."""

    KEEP = auto()
    SWAP = auto()
    RECOMPUTE = auto()
    """The storage is not held: its producer kernel runs again in backward, on tensors that are saved anyway."""


@dataclass(frozen=True, slots=True)
class Site:
    """Place where autograd saved a tensor: the ``ordinal``-th under ``path`` in layer ``layer`` (0-based).

    ``path`` is a submodule's path inside its layer (``mlp.linear_fc2``), or a name of ``site_paths``.
    """

    layer: int
    path: str
    ordinal: int

    def __str__(self) -> str:
        return f"layers.{self.layer}/{self.path}/{self.ordinal}"


@dataclass(frozen=True, slots=True)
class LayerPosition:
    """Position of a layer in the forward of its model chunk."""

    num_after: int  # layers of the chunk that run after this one
    trailing_layers: int  # length of the unbroken run of layers to be swapped at the end of the chunk
    ends_in_loss: bool  # whether the chunk ends in the loss, so that its last layer comes first in backward
    swapped: bool = True  # whether this layer is to be swapped
    num_layers: int = 1  # layers of the chunk

    @property
    def early_release(self) -> bool:
        """True in chunks of fewer than ``FEW_LAYERS`` layers, which release memory storage by storage."""
        # Copies may then use the memory of tensors that the running layer has not saved yet. Longer chunks give that
        # memory back when the layer starts: later frees cost 0.5 to 1 GiB of fragments.
        return self.num_layers < FEW_LAYERS

    def num_trailing_kept(self, window_groups: int) -> int:
        """Return how many trailing layers are kept although they were to be swapped."""
        # Backward needs the last layer at once, and before it as many as the prefetch window holds.
        return min(self.trailing_layers, 1 + window_groups) if self.ends_in_loss else 0

    def is_trailing_kept(self, window_groups: int) -> bool:
        return self.num_after < self.num_trailing_kept(window_groups)


def layer_positions(swapped: list[bool], ends_in_loss: bool) -> list[LayerPosition]:
    """Return the position of each layer of a chunk. ``swapped``: for each layer, whether it is to be swapped."""
    trailing_layers = next((i for i, flag in enumerate(reversed(swapped)) if not flag), len(swapped))
    last = len(swapped) - 1
    return [
        LayerPosition(last - i, trailing_layers, ends_in_loss, flag, len(swapped)) for i, flag in enumerate(swapped)
    ]


@dataclass(frozen=True, slots=True)
class GroupKey:
    """The run of a layer over a micro-batch. ``micro_batch`` counts runs since the graph was last empty."""

    layer: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes of a kind of memory (weights, activations, …) on each tier."""

    kind: str
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0


def is_within(least: float, value: object, most: float) -> bool:
    return isinstance(value, int | float) and least <= value <= most


def format_bytes(num_bytes: float) -> str:
    """Format bytes for people: ``412 MiB``, ``1.50 GiB``."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= 10 * MIB:
        return f"{num_bytes / MIB:.0f} MiB"
    if num_bytes >= MIB / 10:
        return f"{num_bytes / MIB:.2f} MiB"
    return f"{num_bytes / KIB:.1f} KiB"
