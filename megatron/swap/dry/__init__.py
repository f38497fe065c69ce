"""Training steps without a GPU and without weights: their memory and times.

Owns the dry engine, its mode, the costs of operators and models from a config file. May import `run` and rooms
below it.
"""
