"""Report each normalization in TransformerEngine's norm-and-linear modules, so that its output can be recomputed.

One autograd function computes the norm's output and saves it; no module or hook is in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def te_normalization_patch(on_normalized: Callable[..., None]) -> Patch:
    """Make the patch. ``on_normalized(original, arguments, options, result)`` is called after each normalization."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply_normalization(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            on_normalized(original, arguments, options, result)
            return result

        return apply_normalization

    return Patch(
        module="transformer_engine.pytorch.module.layernorm_linear",
        attribute="apply_normalization",
        build=build,
        reason="one autograd function computes the norm's output and saves it, so no hook sees it",
        sources={"transformer_engine 2.17.0": "8e3428cbd710590537f86cb01cdb7c93ce437726103ebde78ea091801828d820"},
        feature="recomputation of norms in TransformerEngine's linear layers",
    )
