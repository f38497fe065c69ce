"""Return the CPU as the current device: upstream writes ``device=torch.cuda.current_device()`` throughout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch


def _build(original: Callable[[], int]) -> Callable[[], Any]:
    def current_device() -> torch.device:
        return torch.device("cpu")

    return current_device


PATCHES = (
    Patch(
        module="torch.cuda",
        attribute="current_device",
        build=_build,
        reason="upstream uses it as a device argument; it raises without CUDA",
        sources={"torch 2.11.0": None},
    ),
)
