"""The edge to Megatron-LM, and the only room that imports `megatron.core` and `megatron.training`.

Owns the command line flags, the boundaries around Megatron's layers, the optimizer adapter, the producers of
recomputable outputs and the loss in parts. May import every room but `session` and `cli`, and `patches`.
"""
