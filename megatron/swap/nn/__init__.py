"""For any PyTorch model, without Megatron.

Owns `activations` (training), `weights` (inference) and `TensorSwap` (tensor by tensor). May import `engine` and
everything below; neither `megatron_lm` nor Megatron.
"""
