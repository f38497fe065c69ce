"""Public path: swapping tensor by tensor."""

from __future__ import annotations

from megatron.swap.tensor_swap.swap import TensorStats, TensorSwap

__all__ = ["TensorStats", "TensorSwap"]
