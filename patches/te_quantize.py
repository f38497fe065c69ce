"""Report each tensor that TransformerEngine quantizes, so that its 8-bit values can be recomputed.

Autograd functions of TransformerEngine's modules call their quantizers; no module or hook is in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def te_quantize_patch(on_quantized: Callable[..., None]) -> Patch:
    """Make the patch. ``on_quantized(original, arguments, options, result)`` is called after each quantization."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def quantize(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            on_quantized(original, arguments, options, result)
            return result

        return quantize

    return Patch(
        module="transformer_engine.pytorch.quantized_tensor",
        attribute="Quantizer.quantize",
        build=build,
        reason="autograd functions quantize their inputs and save the values, so no hook sees both",
        sources={
            "transformer_engine 2.17.0": "0f8fc121457a66dec42fda82e0f715393f4d6d48e53fa35d1e72ba3d0082f585",
            "transformer_engine 2.18.0": "eb90cb330c6f4f173646b2a9060b09eef8429886d27ad69854f878d9081989fb",
        },
        feature="recomputation of 8-bit values",
    )
