"""Report each tensor that TransformerEngine quantizes, and make copies of weights in memory of their own.

Autograd functions of TransformerEngine's modules call their quantizers; no module or hook is in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from megatron.swap.patches.registry import Patch


def te_quantize_patch(
    on_quantized: Callable[..., None] | None, around_weight: Callable[[], AbstractContextManager[Any]]
) -> Patch:
    """Make the patch.

    Args:
        on_quantized: ``on_quantized(original, arguments, options, result)`` is called after each quantization.
        around_weight: makes a context in which a copy of a weight is made that its module keeps.
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def quantize(*arguments: Any, **options: Any) -> Any:
            if is_kept_weight(arguments, options):
                with around_weight():
                    result = original(*arguments, **options)
            else:
                result = original(*arguments, **options)
            if on_quantized is not None:
                on_quantized(original, arguments, options, result)
            return result

        return quantize

    return Patch(
        module="transformer_engine.pytorch.quantized_tensor",
        attribute="Quantizer.quantize",
        build=build,
        reason="autograd functions quantize inputs and weights, and save and keep the values, so no hook sees both",
        sources={
            "transformer_engine 2.17.0": "0f8fc121457a66dec42fda82e0f715393f4d6d48e53fa35d1e72ba3d0082f585",
            "transformer_engine 2.18.0": "eb90cb330c6f4f173646b2a9060b09eef8429886d27ad69854f878d9081989fb",
        },
        feature="recomputation of 8-bit values, and memory of their own for weights in 8 bits",
    )


def is_kept_weight(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a call quantizes a weight for the first time. Modules keep only what is not ``internal``."""
    if len(arguments) != 2 or options.get("out") is not None:
        return False
    quantizer, tensor = arguments
    return isinstance(tensor, nn.Parameter) and not getattr(quantizer, "internal", True)
