"""Facts about a PyTorch model: its layers, its devices, and what works against a plan in it.

Owns `ModelHints`, `layers_of`, `device_of`, `take_over` and `refuse_unplannable`. May import every package below it.
"""
