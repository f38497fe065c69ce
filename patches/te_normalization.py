"""Tell what TransformerEngine's norm-and-linear modules normalize.

Their norm's output is made and saved inside one autograd function; there is no module or hook in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from patches.registry import Patch


def te_normalization_patch(tell: Callable[..., None]) -> Patch:
    """``tell(original, arguments, options, result)`` is called after each normalization."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply_normalization(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            tell(original, arguments, options, result)
            return result

        return apply_normalization

    return Patch(
        module="transformer_engine.pytorch.module.layernorm_linear",
        attribute="apply_normalization",
        build=build,
        reason="the norm's output is made and saved inside one autograd function",
        written_for="transformer_engine 2.20.2",
        source_sha256="8e3428cbd710590537f86cb01cdb7c93ce437726103ebde78ea091801828d820",
    )
