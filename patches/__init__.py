"""Every change of upstream's behaviour: one upstream symbol, or one seam, in each file.

Patches are applied and reverted together (`registry`). They import nothing of ours: what they call is passed to them.
In the repository the folder is at the top, and `megatron/swap/patches` is a link to it. Import `megatron.swap.patches`.
"""
