"""Swaps tensors that a program names: `TensorSwap`.

Owns the mover of storages, the order of operations on them and their transfers. May import `memory`, `devices`,
`native` and `common`.
"""
