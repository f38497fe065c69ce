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
LAYOUTS = ("_transpose", "_columnwise_data")
"""Attributes of the copies for the values that backward reads: with one scale, and with scales of blocks."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_COPIES = 2.5
"""Bytes of all copies of a weight for each of its values: two layouts, scales, and what their kernels need."""


def te_weight_copies_patches(apart: Callable[[float], AbstractContextManager[Any]]) -> list[Patch]:
    """Make the patches, one for each module that has imported the function by name.

    Args:
        apart: takes the bytes that are needed, and makes the context in which a copy is made. 0: what it takes the
            place of was made in such a context.
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def quantize_weight(**options: Any) -> Any:
            weight: Any = options.get("tensor")
            quantizer: Any = options.get("quantizer")
            copy = options.get("workspace")
            # A weight that is in 8 bits already is not copied; what is not cached is freed again.
            if type(weight) not in PLAIN or not options.get("cache") or not lacks(copy, quantizer):
                return original(**options)
            num_bytes = MOST_COPIES * weight.numel() if copy is None else 0.0
            is_internal = getattr(quantizer, "internal", None)
            try:
                with apart(num_bytes):
                    return original(**options)
            except torch.OutOfMemoryError:  # memory that the process has cached is of no use there
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


def lacks(copy: Any, quantizer: Any) -> bool:
    """Return whether the layout for backward is to be made: at first, and after forwards without gradients.

    In those (evaluation, layers that are recomputed whole) upstream drops it. It makes another copy, or this layout.
    A first copy without it is made anew in backward, and stays where activations are.
    """
    if not getattr(quantizer, "columnwise_usage", False):
        return False
    return all(getattr(copy, layout, None) is None for layout in LAYOUTS)
