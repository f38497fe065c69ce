"""Make the 8-bit copy of a weight before TransformerEngine's norm-and-linear module asks for the weight's gradient.

Without a kept copy (``megatron_lm/fp8_weights.py``) the module's backward looks up the buffer of a fused gradient only
if there is a copy, makes the copy later, and then fails. The plain linear module looks up the buffer in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.patches.registry import Patch

COPY, WEIGHT = 1, 2  # indices in the tensors that the module's backward restores
PLAIN = (torch.Tensor, torch.nn.Parameter)


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def restore_from_func_ctx(ctx: Any, *arguments: Any, **options: Any) -> Any:
        restored = original(ctx, *arguments, **options)
        if restored[COPY] is None and type(restored[WEIGHT]) in PLAIN and ctx.weight_quantizer is not None:
            ctx.weight_quantizer.set_usage(rowwise=True, columnwise=True)
            restored = list(restored)
            restored[COPY] = ctx.weight_quantizer(restored[WEIGHT])
        return restored

    return restore_from_func_ctx


PATCH = Patch(
    module="transformer_engine.pytorch.module.layernorm_linear",
    attribute="restore_from_func_ctx",
    build=_build,
    reason="without a kept copy of its weight, a module loses the buffer of its fused gradient",
    sources={
        "transformer_engine 2.17.0": "3052ce5abbd0ffa2265b51a6d6731d142f86cf2c2f86be6f1f88e46835a9e495",
        "transformer_engine 2.18.0": "6374372c93bb9d35c259c5bd4b5723f14f3e31d4fe6faff24f9eb6f791e1a28d",
        "transformer_engine 2.19.0": "458472bd691aea918beb18a15d1aa87837d55a5426bec733c7d75f76b5a39c5b",
    },
    source_of="_LayerNormLinear",
    feature="--swap-fp8-weights recompute",
)
