"""Weights by storage and layer: which layer owns which bytes, where they are, and how they are packed.

A storage moves as a whole, so that all tensors on it keep their strides and aliases. A storage that several layers
share, or a layer and the rest of the model (tied weights), is owned by none of them. While a model trains, only
storages of frozen parameters are owned by a layer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from megatron.swap.common.rounding import round_up
from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.devices.base import ALIGNMENT_BYTES
from megatron.swap.memory.host_memory import PAGE_BYTES, HostRegion

PLAIN = (torch.Tensor, nn.Parameter)
LEAVE_OUT = "Leave that layer out of layers=."


@dataclass(eq=False)
class Weight:
    """A parameter or buffer, and how it views its storage."""

    name: str  # in the model
    tensor: torch.Tensor
    # The modules' dicts that refer to it (`_parameters` or `_buffers`), each with its name there.
    tables: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = self.tensor.data  # as expected: others may replace it (``module.to``)
        self._form = (self.data.dtype, self.data.storage_offset(), self.data.size(), self.data.stride())

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Return its data on ``memory`` (uint8), which holds the bytes of its storage."""
        dtype, offset, size, stride = self._form
        offset += memory.storage_offset() // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, size, stride)

    def put(self, data: torch.Tensor) -> None:
        """Point the tensor to ``data``."""
        self.tensor.data = self.data = data

    def is_in_place(self) -> bool:
        """Whether the modules still refer to the tensor, and others have not moved its data."""
        is_unmoved = self.tensor.data_ptr() == self.data.data_ptr() and self.tensor.dtype == self.data.dtype
        return is_unmoved and all(table.get(name) is self.tensor for table, name in self.tables)


@dataclass(eq=False)
class Block:
    """A storage of the model, and all weights on it."""

    memory: torch.Tensor  # where the bytes are now (uint8)
    is_moved: bool = False  # `memory` is not where the model had the bytes
    weights: dict[int, Weight] = field(default_factory=dict)  # by the `id` of the tensor
    # Numbers of the layers that have any of the weights; None for the rest of the model.
    owners: set[int | None] = field(default_factory=set)
    is_trained: bool = False  # the model trains, and not all of `weights` are frozen parameters

    def __post_init__(self) -> None:
        self.num_bytes = self.memory.numel()
        self.origin = self.memory.device

    @property
    def layer(self) -> int | None:
        """The number of the layer that alone owns it; ``None``: there is no such layer, or it is trained."""
        (owner,) = self.owners if len(self.owners) == 1 and not self.is_trained else (None,)
        return owner

    def versions(self) -> list[int]:
        """Version counters of the weights. They grow at every write, also through tensors of a state dict."""
        return [weight.tensor._version for weight in self.weights.values()]

    def move(self, memory: torch.Tensor) -> None:
        """Copy the bytes to ``memory``, and point weights and gradients there, except what others have moved."""
        memory.copy_(self.memory)
        self.memory, self.is_moved = memory, not self.is_moved
        for weight in self.weights.values():
            if weight.is_in_place():
                weight.put(weight.on(memory))
                grad = weight.tensor.grad
                if grad is not None and grad.device != memory.device:
                    grad.data = grad.to(memory.device)


@dataclass(eq=False)
class Layer:
    """A layer, and how the blocks that it owns are packed."""

    number: int  # position among the layers, from 0
    module: nn.Module
    name: str
    blocks: list[tuple[int, Block]] = field(default_factory=list)  # each with its offset in bytes
    weights: list[Weight] = field(default_factory=list)  # of the blocks, in their order
    num_bytes: int = 0  # of the packed blocks, with the gaps between them
    region: HostRegion | None = None  # host memory of the packed bytes, while they are offloaded
    on_host: list[torch.Tensor] = field(default_factory=list)  # data of each weight in that memory
    on_buffers: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # on each device buffer, by its number

    def add(self, block: Block) -> None:
        """Pack ``block`` behind the others."""
        self.blocks.append((self.num_bytes, block))
        self.weights += block.weights.values()
        self.num_bytes += round_up(block.num_bytes, ALIGNMENT_BYTES)

    @property
    def host_bytes(self) -> int:
        """Size of the packed bytes in host memory, in whole pages."""
        return round_up(self.num_bytes, PAGE_BYTES)

    def chunks(self, memory: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Return each block with its chunk of ``memory`` (uint8), which has room for all of them."""
        return ((block, memory[start : start + block.num_bytes]) for start, block in self.blocks)

    def on(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the data of each weight on ``memory`` (uint8), which holds the packed bytes."""
        return [weight.on(chunk) for block, chunk in self.chunks(memory) for weight in block.weights.values()]

    def put(self, data: Iterable[torch.Tensor]) -> None:
        """Point each weight to its ``data``, except those that others have moved elsewhere."""
        for weight, tensor in zip(self.weights, data, strict=True):
            if weight.is_in_place():
                weight.put(tensor)

    def check_in_place(self) -> None:
        """Raise a ``SwapError`` if somebody has moved the weights elsewhere."""
        moved = [weight.name for weight in self.weights if not weight.is_in_place()]
        if moved:
            raise SwapError(
                f"{', '.join(moved)}: replaced or moved while swapped (module.to, load_state_dict(assign=True), merged "
                "adapters). Do that before swap.weights, or after its end."
            )

    def versions(self) -> list[int]:
        """Version counters of all weights."""
        return [weight.tensor._version for weight in self.weights]

    def block_at(self, offset: int) -> Block:
        """Return the block that has the packed byte ``offset``."""
        return self.blocks[bisect_right(self.blocks, offset, key=itemgetter(0)) - 1][1]

    def check_can_run(self, training: bool) -> None:
        """Raise a ``UsageError`` unless weights are frozen in ``training``, or it is an inference in eval mode."""
        if training:
            unfrozen = [weight.name for weight in self.weights if weight.tensor.requires_grad]
            if unfrozen:
                raise UsageError(
                    f"{', '.join(unfrozen)}: requires gradients now, but only frozen weights can be in host memory. "
                    "Freeze it again (requires_grad_(False)), or close this WeightSwap, unfreeze, and call "
                    "swap.weights again."
                )
            return
        if torch.is_grad_enabled():
            raise UsageError(
                f"{self.name} is called with gradients on, but its weights are on the device only while it runs. Call "
                "the model under torch.no_grad() or torch.inference_mode(). To train other weights than these, freeze "
                "these and pass training=True to swap.weights."
            )
        check_eval(self.module, self.name)


def named_layers(module: nn.Module, layers: Iterable[nn.Module], training: bool) -> dict[nn.Module, str]:
    """Return the layers with their names, or raise a ``UsageError``. Without ``training`` they are in eval mode."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"swap.weights takes a torch.nn.Module, not {type(module).__name__}.")
    if not isinstance(layers, Iterable):
        raise UsageError(f"layers= is a {type(layers).__name__}: give several modules, [model.block] for a single one.")
    found = list(layers)
    names = {owner: name or type(owner).__name__ for name, owner in module.named_modules()}
    if not found:
        raise UsageError("layers= is empty: name the modules whose weights are offloaded, model.layers for instance.")
    for layer in found:
        if not isinstance(layer, nn.Module) or layer not in names:
            what = type(layer).__name__
            raise UsageError(f"layers= has a {what} that is no module of this {names[module]}: take them from it.")
    chosen = {layer: names[layer] for layer in found}
    for layer, name in chosen.items():
        if not training:
            check_eval(layer, name)
        inside = [chosen[owner] for owner in layer.modules() if owner is not layer and owner in chosen]
        if inside:
            raise UsageError(f"{inside[0]} is inside {name}: name one of the two.")
    return chosen


def check_eval(layer: nn.Module, name: str) -> None:
    """Raise a ``UsageError`` if ``layer``, called ``name``, or a module inside it is in training mode."""
    if any(owner.training for owner in layer.modules()):
        raise UsageError(
            f"{name} is in training mode, and its weights are on the device only while it runs: for inference alone. "
            "Call model.eval(), or pass training=True to swap.weights to train other weights than these."
        )


def find_blocks(module: nn.Module, chosen: dict[nn.Module, str], device: torch.device, training: bool) -> list[Block]:
    """Return all storages of weights with owners, layers by position, or raise a ``UsageError`` if one is fixed."""
    owners: dict[nn.Module, set[int | None]] = {part: {None} for part in _outside(module, chosen)}
    for number, layer in enumerate(chosen):
        for part in layer.modules():
            owners.setdefault(part, set()).add(number)
    blocks: dict[int, Block] = {}  # by a storage's address in C, which lives as long as the block does
    for prefix, part in module.named_modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                full_name = f"{prefix}.{name}" if prefix else name
                is_trained = training and (table is part._buffers or tensor.requires_grad)
                obstacle = _obstacle(tensor, device)
                if obstacle and (owners[part] == {None} or is_trained) and tensor.device == device:
                    continue  # it does not move
                if obstacle:
                    raise UsageError(f"{full_name} {obstacle}")
                storage = tensor.untyped_storage()
                if storage.nbytes() == 0:
                    continue
                if storage._cdata not in blocks:
                    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                    blocks[storage._cdata] = Block(empty.set_(storage))
                block = blocks[storage._cdata]
                block.owners |= owners[part]
                block.is_trained |= is_trained
                weight = block.weights.setdefault(id(tensor), Weight(full_name, tensor))
                weight.tables.append((table, name))
    return list(blocks.values())


def _outside(module: nn.Module, chosen: dict[nn.Module, str]) -> set[nn.Module]:
    """Return the modules that can be reached without passing through a layer."""
    found: set[nn.Module] = set()
    to_visit = [module]
    while to_visit:
        owner = to_visit.pop()
        if owner not in chosen and owner not in found:
            found.add(owner)
            to_visit += owner.children()
    return found


def _obstacle(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Return why the bytes of ``tensor`` cannot be moved, or None if they can."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is a {type(tensor).__name__}, which is more than plain memory. {LEAVE_OUT}"
    if tensor.is_meta:
        return (
            "is on the meta device and has no values. Load them before: module.to_empty(device='cpu'), then "
            "module.load_state_dict(…); or load_state_dict(…, assign=True)."
        )
    if tensor.device != device and tensor.device.type != "cpu":
        return f"is on {tensor.device}, neither on {device} nor on the CPU. torch.cuda.set_device, or move the module."
    try:
        _ = tensor._version
    except RuntimeError:  # then writes cannot be detected; a tensor that was only moved in that mode has a version
        return "was made under torch.inference_mode(). Make or load the model outside of it."
    return None


def is_view_of(value: object, storage: torch.UntypedStorage) -> bool:
    """Whether ``value`` is a plain tensor on ``storage``."""
    if not isinstance(value, torch.Tensor) or type(value) not in PLAIN or value.layout is not torch.strided:
        return False
    return value.untyped_storage()._cdata == storage._cdata
