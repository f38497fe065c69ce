"""Refuse use of offloaded optimizer state by a framework between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.swap.common.types import UsageError


def refuse_two_offloaders(settings: Mapping[str, Any], option: str, is_on: bool) -> None:
    """Raise ``UsageError`` if the framework's ``option`` moves, reads or resets state that settings offload."""
    ours = (settings.get("config") or {}).get("optimizer")
    if is_on and ours:
        raise UsageError(
            f"optimizer {ours} cannot be combined with {option}, which moves, reads or resets optimizer state between "
            f"steps. Drop optimizer from config, or turn {option} off."
        )
