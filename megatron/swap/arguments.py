"""Public path: the ``--swap-…`` flags."""

from __future__ import annotations

from megatron.swap.megatron_lm.arguments import swap_config
from megatron.swap.megatron_lm.command_line import add_swap_args

__all__ = ["add_swap_args", "swap_config"]
