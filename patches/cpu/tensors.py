"""Create, keep and name tensors on the CPU where upstream says CUDA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

# Factories that the training loop calls with a CUDA device.
_FACTORIES = ("tensor", "zeros", "ones", "rand", "empty", "empty_like", "full", "arange")


def _current_device(original: Callable[[], int]) -> Callable[[], torch.device]:
    return lambda: torch.device("cpu")


def is_cuda(device: Any) -> bool:
    """Return whether a device argument, in any spelling, means CUDA."""
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*arguments: Any, **options: Any) -> Any:
        if is_cuda(options.get("device")):
            options["device"] = "cpu"
        return original(*arguments, **options)

    return factory


def _cuda(original: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def cuda(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return self

    return cuda


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if arguments or options:
            return original(self, *arguments, **options)  # a conversion, not a question
        name = original(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type_


_TORCH = {"torch 2.11.0": None}
_RAISES = 'upstream passes device="cuda", and torch raises when it cannot initialize CUDA'
_IS_DEVICE = "upstream uses it as a device argument; it raises without CUDA"
_MOVES = "upstream calls it to move parameters, batches and restored optimizer state"
_SORTS = "upstream refuses parameters whose type is not spelled torch.cuda.*"

PATCHES = (
    Patch("torch.cuda", "current_device", _current_device, _IS_DEVICE, _TORCH),
    *(Patch("torch", name, _factory, _RAISES, _TORCH) for name in _FACTORIES),
    Patch("torch", "Tensor.cuda", _cuda, _MOVES, _TORCH),
    Patch("torch", "Tensor.type", _type, _SORTS, _TORCH),
)
