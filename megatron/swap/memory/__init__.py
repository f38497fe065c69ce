"""Memory outside the device: pinned host memory and disk, and the budget that says who may take how much of it.

Owns the budget, pools, arenas, files, staging buffers, and the `Tier` contract with its implementations. Whoever needs
host memory asks here. May import `devices`, `native` and `common`.
"""
