"""Swapping for any PyTorch model, without Megatron.

Owns `activations` (training), `weights` (inference) and `TensorSwap` (tensor by tensor). May import `engine` and
all packages below it; neither `megatron_lm` nor Megatron.
"""
