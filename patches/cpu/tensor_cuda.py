"""Let ``Tensor.cuda()``, and with it ``Module.cuda()``, leave a tensor where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    def cuda(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return self

    return cuda


PATCHES = (
    Patch(
        module="torch",
        attribute="Tensor.cuda",
        build=_build,
        reason="upstream calls it to move parameters, batches and restored optimizer state",
        sources={"torch 2.11.0": None},
    ),
)
