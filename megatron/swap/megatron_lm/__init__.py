"""The adapter to Megatron-LM's models. Besides `trainer` the only package that imports Megatron.

Owns the boundaries around Megatron's layers, the checks of settings against a model, the optimizer adapter, the
producers of recomputable outputs and the chunked cross entropy. May import `patches`, and every package below it.
"""
