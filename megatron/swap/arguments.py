"""Public path: the ``--swap-…`` flags."""

from __future__ import annotations

from megatron.swap.megatron_lm.arguments import add_swap_args, swap_config

__all__ = ["add_swap_args", "swap_config"]
