"""Weights by storage and layer: who has which bytes, where they lie, and how a layer's are packed.

A storage moves as a whole, so that strides and aliases stay, whatever lies on it. What more than one layer has, or a
layer and the rest of the model (tied weights), belongs to none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.swap.host_memory import PAGE_BYTES, HostRegion
from megatron.swap.types import UsageError

ALIGNMENT_BYTES = 512
"""Of storages in a buffer, as the caching allocator aligns its own."""
PLAIN = (torch.Tensor, nn.Parameter)
LEAVE_OUT = "Leave that layer out of layers=."


@dataclass(eq=False)
class Weight:
    """A parameter or buffer, and how it lies on its storage.

    Attributes:
        tables: of the modules that have it (``_parameters`` or ``_buffers``), each with its name there.
        here: where its data are meant to be; others may put them elsewhere (``module.to``).
    """

    name: str
    tensor: torch.Tensor
    tables: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.here = self.tensor.data
        self._form = (self.here.dtype, self.here.storage_offset(), self.here.size(), self.here.stride())

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """Its data, if ``memory`` (uint8) has the bytes of its storage."""
        dtype, offset, size, stride = self._form
        offset += memory.storage_offset() // dtype.itemsize
        return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, size, stride)

    def put(self, data: torch.Tensor) -> None:
        self.tensor.data = self.here = data

    def is_in_place(self) -> bool:
        """Whether the modules still have it, and its data are where we put them."""
        is_here = self.tensor.data_ptr() == self.here.data_ptr() and self.tensor.dtype == self.here.dtype
        return is_here and all(table.get(name) is self.tensor for table, name in self.tables)


@dataclass(eq=False)
class Block:
    """A storage, all that lies on it, and who has any of that: numbers of layers, ``None`` for the rest of the model.

    ``memory`` has its bytes (uint8); ``is_away`` says that this is not where the model had them.
    """

    memory: torch.Tensor
    is_away: bool = False
    weights: dict[int, Weight] = field(default_factory=dict)
    places: set[int | None] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.num_bytes = self.memory.numel()
        self.origin = self.memory.device

    @property
    def layer(self) -> int | None:
        """The number of the layer that alone has it."""
        (place,) = self.places if len(self.places) == 1 else (None,)
        return place

    def move(self, memory: torch.Tensor) -> None:
        """To ``memory``, but for what others have put elsewhere; nothing holds where it was."""
        memory.copy_(self.memory)
        self.memory, self.is_away = memory, not self.is_away
        for weight in self.weights.values():
            if weight.is_in_place():
                weight.put(weight.on(memory))


@dataclass(eq=False)
class Layer:
    """What rests of a layer, packed.

    Attributes:
        blocks: what is packed, each with the byte at which it begins.
        region: the host memory that has it.
        at_home, on_buffers: data of the weights there, and on each buffer.
    """

    number: int
    module: nn.Module
    name: str
    blocks: list[tuple[int, Block]] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    num_bytes: int = 0
    region: HostRegion | None = None
    at_home: list[torch.Tensor] = field(default_factory=list)
    on_buffers: list[list[torch.Tensor]] = field(default_factory=list)

    def add(self, block: Block) -> None:
        self.blocks.append((self.num_bytes, block))
        self.weights += block.weights.values()
        self.num_bytes += -(-block.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def host_bytes(self) -> int:
        return -(-self.num_bytes // PAGE_BYTES) * PAGE_BYTES

    def parts(self, memory: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
        """Each block, and its part of memory (uint8) for all of them."""
        return ((block, memory[start : start + block.num_bytes]) for start, block in self.blocks)

    def on(self, memory: torch.Tensor) -> list[torch.Tensor]:
        return [weight.on(part) for block, part in self.parts(memory) for weight in block.weights.values()]

    def put(self, data: Iterable[torch.Tensor]) -> None:
        for weight, tensor in zip(self.weights, data, strict=True):
            weight.put(tensor)

    def versions(self) -> list[int]:
        """They grow when a weight is written to, also through what a state dict hands out."""
        return [weight.tensor._version for weight in self.weights]

    def check_can_run(self) -> None:
        """Raises ``UsageError``: this is not inference."""
        if torch.is_grad_enabled():
            raise UsageError(
                f"{self.name} is called with gradients on, but its weights are only here while it runs. Call the model "
                "under torch.no_grad() or torch.inference_mode()."
            )
        check_eval(self.module, self.name)


def named_layers(module: nn.Module, layers: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The layers, each once, with their names in the model. Raises ``UsageError``."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"swap.weights takes a torch.nn.Module, not {type(module).__name__}.")
    if not isinstance(layers, Iterable):
        raise UsageError(f"layers= is a {type(layers).__name__}: give several modules, [model.block] for a single one.")
    found = list(layers)
    names = {owner: name or type(owner).__name__ for name, owner in module.named_modules()}
    if not found:
        raise UsageError("layers= is empty: name the modules whose weights rest, model.layers for instance.")
    for layer in found:
        if not isinstance(layer, nn.Module) or layer not in names:
            what = type(layer).__name__
            raise UsageError(f"layers= has a {what} that is no module of this {names[module]}: take them from it.")
    chosen = {layer: names[layer] for layer in found}
    for layer, name in chosen.items():
        check_eval(layer, name)
        inside = [chosen[owner] for owner in layer.modules() if owner is not layer and owner in chosen]
        if inside:
            raise UsageError(f"{inside[0]} is inside {name}: name one of the two.")
    return chosen


def check_eval(layer: nn.Module, name: str) -> None:
    if any(owner.training for owner in layer.modules()):
        raise UsageError(
            f"{name} is in training mode, and its weights are only here while it runs: for inference alone. Call "
            "model.eval()."
        )


def find_blocks(module: nn.Module, chosen: dict[nn.Module, str], device: torch.device) -> list[Block]:
    """All storages of the model's weights, each with who has any of it. Raises ``UsageError``."""
    places: dict[nn.Module, set[int | None]] = {owner: {None} for owner in _outside(module, chosen)}
    for number, layer in enumerate(chosen):
        for owner in layer.modules():
            places.setdefault(owner, set()).add(number)
    blocks: dict[int, Block] = {}  # by a storage's address in C, which lives as long as the block does
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                full_name = f"{prefix}.{name}" if prefix else name
                obstacle = _obstacle(tensor, device)
                if obstacle and places[owner] == {None} and tensor.device == device:
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
                block.places |= places[owner]
                weight = block.weights.setdefault(id(tensor), Weight(full_name, tensor))
                weight.tables.append((table, name))
    return list(blocks.values())


def _outside(module: nn.Module, chosen: dict[nn.Module, str]) -> set[nn.Module]:
    """Modules that are reached without passing through a layer."""
    found: set[nn.Module] = set()
    to_visit = [module]
    while to_visit:
        owner = to_visit.pop()
        if owner not in chosen and owner not in found:
            found.add(owner)
            to_visit += owner.children()
    return found


def _obstacle(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Why its bytes cannot come and go."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is a {type(tensor).__name__} of its own kind, more than plain memory. {LEAVE_OUT}"
    if tensor.is_meta:
        return (
            "is on the meta device and has no values. Load them before: module.to_empty(device='cpu'), then "
            "module.load_state_dict(…); or load_state_dict(…, assign=True)."
        )
    if tensor.device != device and tensor.device.type != "cpu":
        return f"is on {tensor.device}, neither on {device} nor on the CPU. torch.cuda.set_device, or move the module."
    try:
        _ = tensor._version
    except RuntimeError:  # then nobody hears who writes to it; one that was only moved in that mode has its version
        return "was made under torch.inference_mode(). Make or load the model outside of it."
    return None


def is_view_of(value: object, memory: torch.Tensor) -> bool:
    """Whether it is a plain tensor on the storage of ``memory``."""
    if not isinstance(value, torch.Tensor) or type(value) not in PLAIN or value.layout is not torch.strided:
        return False
    return value.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
