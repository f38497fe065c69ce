"""All patches of upstream: one upstream symbol, or one group of them, in each file.

Patches are applied and reverted together (`registry`). They import nothing of ours: the functions that they call are
passed to them. The folder is at the top of the repository, and `megatron/swap/patches` is a link to it. Import
`megatron.swap.patches`.
"""
