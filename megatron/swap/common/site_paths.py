"""Paths of sites that are no submodule of a layer. Profiles, plans and the engine name sites by them."""

from __future__ import annotations

OWN_PATH = "layer"
"""Path of what a layer saves outside its submodules (the residual connections)."""
CHECKPOINT_PATH = "checkpoint"
"""Path of the input of layers that are recomputed whole."""
MODEL_PATH, LOSS_PATH = "model", "loss"
"""Paths of what a model chunk saves outside its submodules: before its layers, and behind them."""
NON_LAYER = -1
"""Instead of a layer's number: of what is in no layer."""
