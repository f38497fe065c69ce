"""Skip compiling Megatron's dataset index builder where it is compiled already.

Megatron runs ``make``. Its wheel has the compiled module and no Makefile, so ``make`` fails and upstream ends the
process. In a source checkout upstream's own function runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def _build(original: Callable[[], Any]) -> Callable[[], Any]:
    def compile_helpers() -> Any:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return None
        return original()

    return compile_helpers


# Looked up at call time (`from ... import` inside a function), so the defining module is the right place.
PATCH = Patch(
    module="megatron.core.datasets.utils",
    attribute="compile_helpers",
    build=_build,
    reason="the wheel ships helpers_cpp compiled and no Makefile, so `make` fails and upstream exits",
    sources={"megatron-core 0.18.2": "84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63"},
    feature="a start that leaves Megatron's dataset index builder as the wheel ships it",
)
