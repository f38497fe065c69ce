"""Megatron Swap: activations leave the GPU between forward and backward, and come back in time.

``megatron.swap.session`` does so for Megatron's trainer. What is offered here does for any PyTorch model:
``activations`` while it trains, ``weights`` while it infers, ``TensorSwap`` tensor by tensor. Nothing is imported
before it is asked for: the planner runs on machines without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.swap.inference import WeightSwap, weights
    from megatron.swap.modules import SwappedActivations, SwapStats, activations
    from megatron.swap.tensors import TensorSwap

__all__ = ["SwapStats", "SwappedActivations", "TensorSwap", "WeightSwap", "activations", "weights"]

_MODULES = {
    "SwapStats": "modules",
    "SwappedActivations": "modules",
    "TensorSwap": "tensors",
    "WeightSwap": "inference",
    "activations": "modules",
    "weights": "inference",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron.swap.{_MODULES[name]}"), name)
