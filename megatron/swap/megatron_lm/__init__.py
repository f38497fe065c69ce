"""The adapter to Megatron-LM, and the only package that imports `megatron.core` and `megatron.training`.

Owns the command line flags, the boundaries around Megatron's layers, the optimizer adapter, the producers of
recomputable outputs and the chunked cross entropy. May import `patches`, and every package but those above it.
"""
