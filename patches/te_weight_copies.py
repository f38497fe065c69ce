"""Make the 8-bit copies of weights, which TransformerEngine keeps, in memory apart from activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

MODULES = ("linear", "layernorm_linear", "grouped_linear")  # of TransformerEngine, that Megatron builds
# Attributes of the copies for the values that backward reads: with one scale, and with scales of blocks.
LAYOUTS = ("_transpose", "_columnwise_data")
PLAIN = (torch.Tensor, torch.nn.Parameter)
MOST_COPIES = 2.5  # bytes of all copies of a weight for each of its values: two layouts, scales, and kernels' needs


def te_weight_copies_patches(apart: Callable[[float], AbstractContextManager[Any]]) -> list[Patch]:
    """Make the patches, one for each module that has imported the function by name.

    ``apart`` takes the bytes that are needed, and makes the context in which a copy is made. The bytes are 0 if the
    copy replaces memory that was made in such a context.
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def quantize_weight(**options: Any) -> Any:
            weight: Any = options.get("tensor")
            quantizer: Any = options.get("quantizer")
            copy = options.get("workspace")
            # Modules make copies in their first forward. A weight in 8 bits is not copied; an uncached copy is freed.
            if type(weight) not in PLAIN or not options.get("cache") or not lacks(copy, quantizer):
                return original(**options)
            num_bytes = MOST_COPIES * weight.numel() if copy is None else 0.0
            is_internal = getattr(quantizer, "internal", None)
            try:
                with apart(num_bytes):
                    return original(**options)
            except torch.OutOfMemoryError:  # the context cannot use memory that the process has cached
                quantizer.internal = is_internal  # upstream restores it only without an error
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
    """Whether the layout for backward is to be made: at first, and after forwards without gradients."""
    # In such forwards (evaluation, layers that are recomputed whole) upstream drops the layout. Later it makes another
    # copy, or this layout. A first copy without the layout is made anew in backward, and stays among activations.
    if not getattr(quantizer, "columnwise_usage", False):
        return False
    return all(getattr(copy, layout, None) is None for layout in LAYOUTS)
