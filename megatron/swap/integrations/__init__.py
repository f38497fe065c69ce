"""Adapters: each calls ``swap.install`` where a training framework has built its model and its optimizer.

Owns one module of at most 60 lines for each framework, and nothing that swaps. May import `session` and `common`, and
the framework of the module; no module here imports another framework's. Only the user's script imports such a module.
"""
