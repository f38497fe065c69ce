"""A run of Megatron's trainer: its command line, its data, its refusals, its report.

Owns `pretrain`, `SwapSession`, `prepare` and `add_swap_args`. May import every package below it. `prepare` runs before
Megatron is imported.
"""
