"""Tell which of queries, keys and values TransformerEngine copies before attention saves them.

Megatron cuts them out of one output of linear_qkv. Where rotary embedding has made new queries and keys, no layout of
TransformerEngine fits the three, and the values become a tensor of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches.registry import Patch


def te_qkv_layout_patch(tell: Callable[[Any, Any], None]) -> Patch:
    """``tell(given, used)`` is called for each of the three, as it came and as attention will use it."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_qkv_layout(query: Any, key: Any, value: Any, *arguments: Any, **options: Any) -> Any:
            result = original(query, key, value, *arguments, **options)
            for given, used in zip((query, key, value), result[1:4], strict=True):
                tell(given, used)
            return result

        return get_qkv_layout

    return Patch(
        module="transformer_engine.pytorch.attention.dot_product_attention.utils",
        attribute="get_qkv_layout",
        build=build,
        reason="the values are copied by a function called by name, and saved as they come out of it",
        written_for="transformer_engine 2.20.2",
        source_sha256="5ad16630d088492b805225f926b93de9a923d5103c1d86723d410b4a10e96174",
    )
