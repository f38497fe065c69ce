"""Upstream writes ``device=torch.cuda.current_device()`` throughout: answer with the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from patches.registry import Patch


def _build(original: Callable[[], int]) -> Callable[[], Any]:
    def current_device() -> torch.device:
        return torch.device("cpu")

    return current_device


PATCHES = (
    Patch(
        module="torch.cuda",
        attribute="current_device",
        build=_build,
        reason="used as a device argument by upstream; raises without CUDA",
        written_for="torch 2.11.0",
    ),
)
