"""Megatron's models by arithmetic: flags, shapes, kernels, FP8, GPUs, and the options of a training command.

Owns what is known of a model before it runs, and the figures of it that a plan needs. Uses no torch and no Megatron;
may import `planner` and `common`.
"""
