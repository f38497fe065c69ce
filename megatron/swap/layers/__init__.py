"""The boundaries around the layers of a model, Megatron's or any other.

Owns `Layers`, `Boundary`, and how a layer is run again. May import every package below it.
"""
