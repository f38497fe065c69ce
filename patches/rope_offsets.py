"""Give TransformerEngine's rotary embedding a tensor whose values it can count.

Its kernel has 32-bit offsets. Keys are a view of linear_qkv's output, so an 8B's keys pass 2**31 from 349,526 tokens
on: the kernel then reads at negative offsets. A copy of the keys alone is six times as short. Packed documents
(``thd``) have a function of their own in Megatron, which calls the same kernel. Its offset is a token's number in the
whole pack times the stride, however short the documents are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch

MOST_OFFSET = 2**31 - 1


def last_offset(tensor: Any) -> int:
    """Return the offset of a tensor's last value from its first, in values."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _build(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rotary(t: Any, *arguments: Any, **options: Any) -> Any:
        if last_offset(t) > MOST_OFFSET:
            t = t.contiguous()
        if last_offset(t) > MOST_OFFSET:
            raise ValueError(
                f"Rotary embedding: {tuple(t.shape)} are more than 2**31 values, which TransformerEngine's kernel "
                "cannot count. Add --no-rope-fusion, or train on shorter sequences."
            )
        return original(t, *arguments, **options)

    return rotary


SOURCES = {
    "fused_apply_rotary_pos_emb": {
        "megatron-core 0.16.1": "cf8982e0b8a3e8ef8b71cf35f5569d1efd73f5a4ad6d365897013b255d273a30"
    },
    "fused_apply_rotary_pos_emb_thd": {
        "megatron-core 0.16.1": "a675cb589e3225e82e01307fd729776e057deb1400ea9fc1ed59bb73c4398384",
        "megatron-core 0.17.1": "5b44acd68ec9e0ef023c7daf190e688bc63b259d8160f106601fa9624bdabc3b",
    },
}
PATCHES = tuple(
    Patch(
        module="megatron.core.models.common.embeddings.rope_utils",
        attribute=attribute,
        build=_build,
        reason="its kernel has 32-bit offsets, which keys of long sequences exceed",
        sources=sources,
        feature="rotary embeddings of sequences so long that a layer's queries, keys and values are more than 2**31 "
        "values",
    )
    for attribute, sources in SOURCES.items()
)
