"""Memory outside the device: pinned host memory and disk, and the budget that says who may take how much of it.

Owns the budget, pools, arenas, files, staging buffers, and the `Tier` contract with its implementations. Activations go
through a tier, whose slots are reused all the time. Optimizer state takes memory once, from an arena or a disk file.
May import `devices`, `native` and `common`.
"""
