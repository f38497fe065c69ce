"""Run the forward of a block with full recomputation inside a context of ours.

Megatron's ``CheckpointFunction`` saves the tensors that full recomputation keeps, between the layers of a block. No
layer's boundary encloses that code, and the block has no hook there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron.swap.patches.registry import Patch


def checkpointed_forward_patch(around: Callable[[Any], AbstractContextManager[None]]) -> Patch:
    """Make the patch. ``around(block)`` returns the context in which the block's checkpointed forward runs."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checkpointed_forward(block: Any, *arguments: Any, **options: Any) -> Any:
            with around(block):
                return original(block, *arguments, **options)

        return checkpointed_forward

    return Patch(
        module="megatron.core.transformer.transformer_block",
        attribute="checkpointed_forward",
        build=build,
        reason="full recomputation saves the inputs of its segments outside the boundaries of layers",
        sources={
            "megatron-core 0.18.2": "7f7b0af2abb9722c94f86bb6122cd8e8a33082e4e135f50e75144ea354c3694d",
            "megatron-core 0.19.0": "163861b4ad4fa9d4a7262711df2a7b957e8a9215a7b0086960d45a05ea2c5565",
        },
    )
