"""Megatron compiles its dataset index builder by ``make``; the wheel ships it compiled, without a Makefile.

Upstream then ends the whole process, on machines with a GPU too. A source checkout has the Makefile: there
upstream goes on as ever.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from patches.registry import Patch


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
    reason="the wheel has helpers_cpp compiled but no Makefile; `make` fails and upstream exits",
    written_for="megatron-core 0.19.2",
    source_sha256="84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63",
)
