"""Swapping for any PyTorch model, without Megatron.

Owns `activations` (training) and `weights` (inference, and frozen weights in training). May import `operators`,
`autotune`, `engine`, `profiling`, `planner`, `memory`, `devices`, `native` and `common`. Knows nothing of Megatron.
"""
