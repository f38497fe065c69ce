"""Drop upstream's line about allocated CUDA memory, which shows zeros without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.swap.patches.registry import Patch


def _build(original: Callable[..., Any]) -> Callable[..., None]:
    def report_memory(name: str, process_group: Any = None) -> None:
        return None

    return report_memory


# Imported by name into the module that reports.
PATCHES = (
    Patch(
        module="megatron.training.training",
        attribute="report_memory",
        build=_build,
        reason="reports zeros, and raises with --log-device-memory-used",
        sources={
            "megatron-core 0.18.2": "19f3ac85868d45a13a7009c7c90fe7bbe3199444ee82b705e316a0ba0cb23628",
            "megatron-core 0.19.0": "ba08bcff29266712da37191bd768d0748769cf94fb6bd27907b39d8e03debd09",
        },
    ),
)
