"""Report which of queries, keys and values TransformerEngine copies before attention saves them.

Megatron cuts all three out of one output of linear_qkv. Rotary embedding replaces queries and keys by new tensors. Then
no layout of TransformerEngine fits the three, so the values are copied to a tensor of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def te_qkv_layout_patch(on_layout: Callable[[Any, Any], None]) -> Patch:
    """Make the patch. ``on_layout(given, used)`` is called for each of the three, as given and as attention uses it."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_qkv_layout(query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
            result = original(query, key, value, *arguments, **options)
            for given, used in zip((query, key, value), result[1:4], strict=True):
                on_layout(given, used)
            return result

        return get_qkv_layout

    return Patch(
        module="transformer_engine.pytorch.attention.dot_product_attention.utils",
        attribute="get_qkv_layout",
        build=build,
        reason="the values are copied by a function called by name, and attention saves the copy",
        sources={
            "transformer_engine 2.17.0": "0322e27fe7e46aca8765404be37a0bc61dc1c3e7f55afab3aec1194b58c23aa1",
            "transformer_engine 2.19.0": "5ad16630d088492b805225f926b93de9a923d5103c1d86723d410b4a10e96174",
        },
        feature="recomputation of the values that TransformerEngine copies",
    )
