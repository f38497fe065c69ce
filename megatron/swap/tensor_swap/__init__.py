"""Swaps tensors that a program names: `TensorSwap`.

Owns the mover of storages, the order of operations on them and their transfers. May import `engine`, `memory`,
`devices`, `native` and `common`.
"""
