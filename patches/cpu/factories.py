"""Create on the CPU what upstream creates by ``torch.tensor(..., device="cuda")``: flags, counters and norms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

# Factories that the training loop calls with a CUDA device.
_FACTORIES = ("tensor", "zeros", "ones", "rand", "empty", "empty_like", "full", "arange")


def is_cuda(device: Any) -> bool:
    """Return whether a device argument, in any spelling, means CUDA."""
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def factory(*arguments: Any, **options: Any) -> Any:
        if is_cuda(options.get("device")):
            options["device"] = "cpu"
        return original(*arguments, **options)

    return factory


PATCHES = tuple(
    Patch(
        module="torch",
        attribute=name,
        build=_build,
        reason='upstream passes device="cuda", and torch raises when it cannot initialize CUDA',
        sources={"torch 2.11.0": None},
    )
    for name in _FACTORIES
)
