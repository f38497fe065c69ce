"""Operators: the one that made a saved tensor, by PyTorch's dispatcher, runs again in backward.

Owns records, kinds and repeats of operators. May import `engine`, `devices`, `native` and `common`.
"""
