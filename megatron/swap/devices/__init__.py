"""Streams, events and device memory: CUDA, and an emulation on the CPU that makes ordering faults visible.

Owns `Device` with its two implementations. May import `native` and `common`.
"""
