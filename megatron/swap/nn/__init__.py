"""Swapping for any PyTorch model, without Megatron.

Owns `activations` (training), `weights` (inference, and frozen weights in training) and `TensorSwap` (tensor by
tensor). May import `autotune`, `engine`, `profiling`, `planner`, `memory`, `devices`, `native` and `common`. Knows
nothing of Megatron.
"""
