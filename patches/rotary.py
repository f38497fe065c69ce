"""Tell what attention's rotary embedding makes.

It is a function that attention calls by name, fused or not: no submodule stands for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patches.registry import Patch


def rotary_patch(watched: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    """``watched(function)`` takes the function's place."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        return watched(original)

    return Patch(
        module="megatron.core.transformer.attention",
        attribute="apply_rotary_pos_emb",
        build=build,
        reason="rotary embedding is a function called by name: nothing else tells what it made",
        written_for="megatron-core 0.19.2",
        source_sha256="6ebc796813c1ef91d786eef53def01cea8a613d60185be166b6d4f5f232a49ba",
    )
