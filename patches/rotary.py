"""Watch the calls of attention's rotary embedding, so that its outputs can be recomputed.

Attention calls the function by name, fused or not. No submodule computes it, so no hook sees its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def rotary_patch(watched: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """Make the patch. ``watched(function)`` returns the replacement of the function."""
    return Patch(
        module="megatron.core.transformer.attention",
        attribute="apply_rotary_pos_emb",
        build=lambda original: watched(original),  # of this module, which `Patch.file` names
        reason="rotary embedding is a function called by name, so no hook sees its output",
        sources={
            "megatron-core 0.16.1": "2752798f27ef46ca8a977e6f63e3f001cd0e56aca59ec920483094e4336a7d0f",
            "megatron-core 0.18.2": "08384c1eead5382263e070bc4664bd1581db49b07bf80170a709e50daab73055",
            "megatron-core 0.19.0": "6ebc796813c1ef91d786eef53def01cea8a613d60185be166b6d4f5f232a49ba",
        },
        feature="recomputation of rotary embeddings",
    )
