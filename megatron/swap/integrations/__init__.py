"""Adapters: each calls ``swap.install`` or ``swap.activations`` where a training framework has built its model.

Owns one module of at most 60 lines for each framework, and nothing that swaps. May import `session`, `nn` and `common`,
and the framework of the module; no module here imports another framework's. Only the user's script imports such a
module.
"""
