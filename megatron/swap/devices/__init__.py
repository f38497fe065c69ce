"""Streams, events and device memory: CUDA, and an emulation on the CPU that makes ordering faults visible.

Owns `Device` with its implementations; the dry one computes nothing, and counts time and memory. May import `native`
and `common`.
"""
