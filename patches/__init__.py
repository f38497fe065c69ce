"""All patches of upstream: one upstream symbol, or one group of symbols, in each file.

Patches are applied and reverted together (`registry`). They import nothing of ours: their functions are passed to them.
The folder is at the top of the repository; `megatron/swap/patches` is a link. Import `megatron.swap.patches`.
"""
