"""Public path: the ``--swap-…`` flags."""

from __future__ import annotations

from megatron.swap.trainer.command_line import add_swap_args, swap_config

__all__ = ["add_swap_args", "swap_config"]
