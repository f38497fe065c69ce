"""Adapters: each calls ``swap.install`` or ``swap.activations`` where a training framework has built its model.

Owns a module for each framework, and nothing that swaps. May import `run` and `common`, and the framework of
the module. Only the user's script imports such a module.
"""
