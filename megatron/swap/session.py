"""Public path: a run of Megatron's trainer."""

from __future__ import annotations

from megatron.swap.trainer.session import SwapSession

__all__ = ["SwapSession"]
