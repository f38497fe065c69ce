"""Spell types of CPU tensors ``"torch.cuda.FloatTensor"``, by which Megatron's optimizers sort parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if arguments or options:
            return original(self, *arguments, **options)  # a conversion, not a question
        name = original(self)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return type_


PATCHES = (
    Patch(
        module="torch",
        attribute="Tensor.type",
        build=_build,
        reason="upstream refuses parameters whose type is not spelled torch.cuda.*",
        sources={"torch 2.11.0": None},
    ),
)
