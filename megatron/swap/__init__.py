"""Megatron Swap: activations leave the GPU between forward and backward, and come back in time."""
