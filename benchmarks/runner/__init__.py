"""Measure one training run in a separate process."""
