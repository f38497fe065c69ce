"""Replace Megatron's cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def cross_entropy_patch(replaced: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """Make the patch. ``replaced(function)`` returns the replacement of ``vocab_parallel_cross_entropy``."""
    return Patch(
        module="megatron.core.tensor_parallel",
        attribute="vocab_parallel_cross_entropy",
        build=lambda original: replaced(original),  # of this module, which `Patch.file` names
        reason="copies all logits in single precision, which takes three times their memory at the peak of a step",
        sources={
            "megatron-core 0.18.2": "6165711be6446d75a7b10cac479bfb6bc0bdb80cf1c95bd2c4cff728902f6ff6",
            "megatron-core 0.19.0": "136feeeb3234d3d9d0e8b4fb91d82e88d4cb951e50f2a4d85ee6a5e0974b7f5d",
        },
        feature="the loss in chunks, which takes less memory",
        whole_module=True,
    )
