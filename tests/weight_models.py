"""Models whose weights are swapped, and devices for them."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatron.swap.common.types import GIB
from megatron.swap.devices.base import Device
from megatron.swap.devices.emulated import EmulatedDevice
from tests.lazy_device import LazyDevice


class Far(EmulatedDevice):
    """An emulated device on which tensors on the CPU are not. It counts its allocations; ``room_bytes`` limits them."""

    def __init__(self, *arguments: Any, room_bytes: int = GIB) -> None:
        super().__init__(*arguments)
        self.torch_device = torch.device("cpu", 0)
        self.room_bytes = room_bytes
        self.taken_bytes = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if num_bytes + self.taken_bytes > self.room_bytes:
            raise torch.OutOfMemoryError("no room")
        memory = super().allocate(num_bytes)
        self.taken_bytes += num_bytes
        weakref.finalize(memory.untyped_storage(), self._freed, num_bytes)
        return memory

    def _freed(self, num_bytes: int) -> None:
        self.taken_bytes -= num_bytes


DEVICES: dict[str, Callable[[], Device]] = {
    "emulated": lambda: EmulatedDevice(0.003, seed=3),
    "far": lambda: Far(0.003),
    "lazy": LazyDevice,
}


class Stack(nn.Module):
    """Layers between others. ``order`` says which layers run, and when."""

    def __init__(self, layers: list[nn.Module], first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.last = first, nn.ModuleList(layers), last
        self.order = list(range(len(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.layers[number](x)
        return self.last(x)


def mlp(num_layers: int = 5, width: int = 16, dtype: torch.dtype = torch.float32) -> tuple[Stack, torch.Tensor]:
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)]
    return Stack(layers, nn.Linear(4, width), nn.Linear(width, 3)).to(dtype), torch.randn(2, 4, dtype=dtype)


def transformer() -> tuple[Stack, torch.Tensor]:
    layers: list[nn.Module] = [nn.TransformerEncoderLayer(16, 2, 32 + 8 * i, batch_first=True) for i in range(4)]
    return Stack(layers, nn.Embedding(11, 16), nn.Linear(16, 11)), torch.randint(0, 11, (2, 7))


def convolutions() -> tuple[Stack, torch.Tensor]:
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)
    ]
    model = Stack(layers, nn.Conv2d(3, 4, 1), nn.Flatten()).to(memory_format=torch.channels_last)
    for _ in range(2):
        model(torch.randn(2, 3, 6, 6))  # statistics that are their own in each layer
    return model, torch.randn(2, 3, 6, 6)


def tied() -> tuple[Stack, torch.Tensor]:
    """Return a model that ties embedding and output, two layers, two names in one layer, and two views of one
    memory."""
    model, tokens = transformer()
    assert isinstance(model.last, nn.Linear)
    model.last.weight = model.first.weight
    layers: Any = model.layers
    layers[1].self_attn.out_proj.weight = layers[0].self_attn.out_proj.weight
    layers[2].norm1.weight = layers[2].norm2.weight
    both = torch.randn(2, 16)
    layers[3].norm1.bias, layers[3].norm2.bias = nn.Parameter(both[0]), nn.Parameter(both[1])
    return model, tokens


def moved_in_inference_mode() -> tuple[Stack, torch.Tensor]:
    model, x = mlp()
    with torch.inference_mode():
        return model.double(), x.double()


MODELS = {
    "mlp": mlp,
    "bfloat16": lambda: mlp(dtype=torch.bfloat16),
    "float64": lambda: mlp(dtype=torch.float64),
    "one layer": lambda: mlp(1),
    "two layers": lambda: mlp(2),
    "transformer": transformer,
    "convolutions": convolutions,
    "tied": tied,
    "moved in inference mode": moved_in_inference_mode,
}


def picture(model: nn.Module) -> list[Any]:
    """Return every weight: its object, values, type, and its place in memory. Memories are numbered."""
    numbers: dict[int, int] = {}
    found = []
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        number = numbers.setdefault(tensor.untyped_storage().data_ptr(), len(numbers))
        form = (tensor.dtype, tensor.device, tensor.storage_offset(), tensor.size(), tensor.stride())
        found.append((name, id(tensor), number, tensor.untyped_storage().nbytes(), form, tensor.tolist()))
    return found


def num_hooks(model: nn.Module) -> int:
    return sum(len(owner._forward_pre_hooks) + len(owner._forward_hooks) for owner in model.modules())
