"""Let the caller build the tokenizer, so that a missing library or file is named.

Megatron builds it while it validates its arguments: nothing of ours runs between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def tokenizer_patch(build_with: Callable[..., Any]) -> Patch:
    """Make the patch. ``build_with`` gets the original and its arguments, and returns the tokenizer."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def build_tokenizer(*arguments: Any, **options: Any) -> Any:
            return build_with(original, *arguments, **options)

        return build_tokenizer

    return Patch(
        module="megatron.training.global_vars",
        attribute="build_tokenizer",
        build=build,
        reason="a tokenizer whose library is missing ends in `name 'AutoTokenizer' is not defined`",
        sources={"megatron-core 0.18.2": "8f75e55822c6a198bba553f0ccf63e9ffa5a14fcea3040b02f5600c9dc1de39e"},
        feature="an error that names what a tokenizer lacks",
    )
