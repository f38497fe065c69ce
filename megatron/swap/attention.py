"""Public path: fused core attention for Megatron's local spec."""

from __future__ import annotations

from megatron.swap.megatron_lm.attention import sdpa_layer_spec

__all__ = ["sdpa_layer_spec"]
