"""Make the 8-bit copies of weights, which TransformerEngine keeps, in memory of their own.

Modules make them in their first forward, among activations that come and go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

MODULES = ("linear", "layernorm_linear", "grouped_linear")
"""The modules of TransformerEngine's linear layers that Megatron builds."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_COPIES = 2.5
"""Bytes of all copies of a weight for each of its values: two layouts, scales, and what their kernels need."""


def te_weight_copies_patches(apart: Callable[[float], AbstractContextManager[Any]]) -> list[Patch]:
    """Make the patches, one for each module that has imported the function by name.

    Args:
        apart: takes the bytes that are needed, and makes the context in which a copy is made.
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def quantize_weight(**options: Any) -> Any:
            weight, quantizer = options.get("tensor"), options.get("quantizer")
            is_first = options.get("cache") and options.get("workspace") is None
            # A weight that is in 8 bits already is not copied; what is not cached is freed again.
            if weight is None or type(weight) not in PLAIN or not is_first:
                return original(**options)
            is_internal = getattr(quantizer, "internal", None)
            try:
                with apart(MOST_COPIES * weight.numel()):
                    return original(**options)
            except torch.OutOfMemoryError:  # memory that the process has cached is of no use there
                if quantizer is not None:
                    quantizer.internal = is_internal  # upstream restores it only where all goes well
                return original(**options)

        return quantize_weight

    return [
        Patch(
            module=f"transformer_engine.pytorch.module.{module}",
            attribute="quantize_weight",
            build=build,
            reason="makes the copy of a weight that its module keeps amid activations, and so divides their memory",
            sources={"transformer_engine 2.17.0": "1d71a50e2eb53ffbdf83b245991a787affd4f047f86e2d94091befc53a5f63bb"},
            feature="memory of their own for weights in 8 bits",
        )
        for module in MODULES
    ]
