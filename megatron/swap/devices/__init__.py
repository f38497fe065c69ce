"""Streams, events and device memory: the real ones of a GPU, and an emulation that makes ordering faults visible."""
