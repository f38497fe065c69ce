"""Measuring and showing: benchmarks, traces, reports. Nothing of it runs in training."""
