"""Paths of sites outside a layer's submodules, as profiles, plans and the engine name them."""

OWN_PATH = "layer"  # tensors that a layer saves outside its submodules (residual connections)
CHECKPOINT_PATH = "checkpoint"  # the input of a layer that is recomputed whole
SOURCE_PATH = "source"  # tensors that nothing saves, and that single operators are recomputed from
MODEL_PATH, LOSS_PATH = "model", "loss"  # tensors that a chunk saves before its layers, and behind them
NON_LAYER = -1  # stands for the layer number at sites outside all layers
