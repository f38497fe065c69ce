"""One `Run` for every model: builds its parts from the settings, puts them on the model, ends its steps, closes it.

Owns the composition root, `train`, `activations` and `install`. May import every package below it.
"""
