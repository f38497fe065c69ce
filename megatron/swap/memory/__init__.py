"""Memory outside the device: pinned host memory, disk, and the budget that limits them.

Owns the budget, pools, arenas, files, staging buffers, and the `Tier` contract with its implementations. Activations
lease slots of a tier again and again. Optimizer state takes memory once, from an arena or a disk file.
May import `devices`, `native` and `common`.
"""
