"""Weights by layer: in host memory while their layer does not run.

Owns `weights` and its buffers. May import every package below it.
"""
