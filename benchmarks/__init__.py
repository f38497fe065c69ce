"""Benchmarks, traces and reports. Training imports nothing of this package."""
