"""Builds the parts of a run from the settings, puts them on a model, follows its steps, removes them.

Owns the composition root and `install`. May import every package below it.
"""
