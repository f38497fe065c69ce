"""Paths of sites outside a layer's submodules, as profiles, plans and the engine name them."""

from __future__ import annotations

OWN_PATH = "layer"
"""Path of tensors that a layer saves outside its submodules (residual connections)."""
CHECKPOINT_PATH = "checkpoint"
"""Path of the input of a layer that is recomputed whole."""
SOURCE_PATH = "source"
"""Path of tensors that nothing saves, and that single operators are recomputed from."""
MODEL_PATH, LOSS_PATH = "model", "loss"
"""Paths of tensors that a model chunk saves outside its layers: before the layers, and after them."""
NON_LAYER = -1
"""Placeholder for the layer number at sites outside all layers."""
