"""Megatron Swap: activations leave the GPU between forward and backward, and come back in time.

``swap.activations(model)`` does so for any PyTorch model; ``megatron.swap.session`` for Megatron's trainer. Nothing is
imported before it is asked for: the planner runs on machines without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.swap.modules import SwappedActivations, SwapStats, activations

__all__ = ["SwapStats", "SwappedActivations", "activations"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("megatron.swap.modules"), name)
