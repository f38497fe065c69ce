"""Operators of PyTorch's dispatcher that made saved tensors, and run again in backward.

Owns records, kinds and repeats of operators. May import `engine`, `devices`, `native` and `common`.
"""
