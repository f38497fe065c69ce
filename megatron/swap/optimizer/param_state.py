"""Records of offloaded optimizer state: its tensors, its parameters, and the shards that are loaded and stepped.

The optimizer and the model keep their reference to the object of an offloaded tensor. The object keeps its shape, on a
single element of memory that is NaN: reads give NaN, writes raise an error, neither is an illegal access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from megatron.swap.common.disk_buffers import BLOCK_BYTES
from megatron.swap.memory.disk_file import DiskRoom, padded
from megatron.swap.optimizer.wrapped import drop_caches, stored

ALIGNED_ELEMENTS = 128  # shards begin at a multiple of it: vectorized kernels read aligned memory faster
MAIN = "main"  # a parameter's own values among its offloaded tensors
T = TypeVar("T")


class OffloadedTensor:
    """A tensor whose values are in host memory (uint8) or on disk: in ``backing``."""

    def __init__(self, tensor: torch.Tensor, backing: torch.Tensor | DiskRoom) -> None:
        # The object that the optimizer and the model refer to.
        self.tensor = tensor
        self.backing = backing
        self.num_bytes = backing.num_bytes if isinstance(backing, DiskRoom) else backing.numel()
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def release(self) -> None:
        """Free the object's memory except one element; shape and device stay."""
        self.tensor.data = placeholder(self, self.dtype)

    def materialize(self) -> None:
        """Put the object on its backing until the next ``release``, for a checkpoint. A disk's backing is mapped."""
        data = self.backing.view() if isinstance(self.backing, DiskRoom) else self.backing
        self.tensor.data = data.view(self.dtype).view(self.shape)


class Span(NamedTuple):
    """Bytes ``start`` to ``stop`` of an offloaded tensor's backing."""

    tensor: OffloadedTensor
    start: int
    stop: int


@dataclass(eq=False)
class ParamState:
    """The offloaded tensors and shards of one parameter."""

    param: torch.Tensor  # the object in the optimizer's groups
    # Offloaded tensors of the parameter's shape, by name; `MAIN` is the parameter itself, if its values are offloaded
    # too.
    tensors: dict[str, OffloadedTensor] = field(default_factory=dict)
    shards: list[ParamShard] = field(default_factory=list)  # slices of it, in order; empty until the first step
    wrappers: dict[str, torch.Tensor] = field(default_factory=dict)  # the optimizer's objects around some of `tensors`

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The offloaded entries of the optimizer's state by name: all but the parameter's own values."""
        tensors = {name: offloaded.tensor for name, offloaded in self.tensors.items() if name != MAIN}
        return tensors | self.wrappers

    def wrap(self, name: str, value: torch.Tensor) -> None:
        """Release the tensor in ``value``, an entry of the optimizer's state, and keep ``value`` as the entry."""
        drop_caches(value)
        self.tensors[name].tensor = stored(value)
        self.tensors[name].release()
        self.wrappers[name] = value

    def loaded(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the entry ``name`` of the optimizer's state with ``values``, which are on the device."""
        if name not in self.wrappers:
            return values
        stored(self.wrappers[name]).data = values
        return self.wrappers[name]

    def release_wrapped(self) -> None:
        """Release the tensors that ``loaded`` put into wrappers."""
        for name in self.wrappers:
            self.tensors[name].release()

    @property
    def num_bytes(self) -> int:
        return sum(offloaded.num_bytes for offloaded in self.tensors.values())

    @property
    def element_bytes(self) -> int:
        """Bytes of all offloaded tensors per element of the parameter."""
        return sum(offloaded.dtype.itemsize for offloaded in self.tensors.values())

    @property
    def disk_bytes(self) -> int:
        return sum(one.num_bytes for one in self.tensors.values() if isinstance(one.backing, DiskRoom))

    @property
    def alignment_elements(self) -> int:
        """Alignment of each shard's start, in elements: on disk a shard begins at a block."""
        return BLOCK_BYTES if self.disk_bytes else ALIGNED_ELEMENTS


@dataclass(eq=False)
class ParamShard:
    """Elements ``start`` to ``stop`` of a parameter."""

    param_state: ParamState
    start: int
    stop: int
    has_state: bool = False  # stepped or loaded before; until then its moments are allocated but have no values
    # State without the parameter's shape (a step counter, say), which is never offloaded.
    small_state: dict[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes in all offloaded tensors, each rounded up to a whole block of the disk."""
        num_elements = self.stop - self.start
        return sum(padded(num_elements * one.dtype.itemsize) for one in self.param_state.tensors.values())

    def tensors_to_load(self) -> list[tuple[str, OffloadedTensor]]:
        """Return names and tensors that a step of this shard reads."""
        return [(name, one) for name, one in self.param_state.tensors.items() if name == MAIN or self.has_state]

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shard's elements of ``tensor``, flat; of a whole parameter in its own shape."""
        if self.stop - self.start == tensor.numel():
            return tensor.detach()
        return tensor.detach().view(-1)[self.start : self.stop]

    def span_of(self, offloaded: OffloadedTensor) -> Span:
        itemsize = offloaded.dtype.itemsize
        return Span(offloaded, self.start * itemsize, self.stop * itemsize)


def placeholder(like: torch.Tensor | OffloadedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of ``like``'s shape and device on one element: NaN, or the least value of an integer type."""
    value = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=like.device).expand(like.shape)


def batches(items: Iterable[T], bytes_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield ``items`` in their order, in batches of at most ``most_bytes``, or of a single larger one."""
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        num_bytes = bytes_of(item)
        if batch and batch_bytes + num_bytes > most_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += num_bytes
    if batch:
        yield batch


def has_shape_of(value: Any, param: torch.Tensor) -> bool:
    """Whether ``value``, an entry of a parameter's state, has a value per element of ``param``."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape
