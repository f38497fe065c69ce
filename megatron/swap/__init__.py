"""Megatron Swap: activations leave the GPU between forward and backward, and come back in time."""

from importlib import import_module
from typing import Any

_OFFERED = {"weights": "megatron.swap.inference"}
"""What a user finds here, and the module that has it; imported when it is asked for, torch with it."""


def __getattr__(name: str) -> Any:
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OFFERED[name]), name)
