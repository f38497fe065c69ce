"""Public path: before Megatron is imported."""

from __future__ import annotations

from megatron.swap.trainer.prepare import prepare

__all__ = ["prepare"]
