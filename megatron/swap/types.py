"""Public path: the errors that this package raises on purpose, and the units of its figures."""

from __future__ import annotations

from megatron.swap.common.types import GIB, KIB, MIB, SwapError, UsageError

__all__ = ["GIB", "KIB", "MIB", "SwapError", "UsageError"]
