"""Long runs: what a process holds after thousands of steps, and whether losses stay equal to the bit.

Each case runs in a process of its own, with swapping and without. ``meters`` samples the process between steps and
decides whether it is flat; ``trainer`` runs Megatron's trainer, ``loops`` runs loops of other people's shape around
``swap.activations``.
"""
