"""One training run in a process of its own, measured."""
