"""The C++ parts, built on first use: the transfer queue, storages that refuse access, the out-of-memory guard.

Owns the sources, their build, and a Python fallback for the transfer queue, by which
`swap.TensorSwap` copies. May import `common`.
"""
