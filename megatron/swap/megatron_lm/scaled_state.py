"""Optimizer state in fp16 and in 8 bits, which TransformerEngine's Adam keeps with one scale for each parameter.

Its step takes the largest value of a whole parameter, so parameters cannot be stepped in slices. It copies the state of
all stepped parameters to single precision, so they are stepped a bucket at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.swap.optimizer.param_state import MAIN
from megatron.swap.optimizer.state import OptimizerState

# Attribute of TransformerEngine's Adam: types of its state by name; uint8 stands for 8 bits.
TYPES = "name_to_dtype_map"
MASTER = "master_param"  # a parameter's values in single precision, or their remainder beyond a parameter in bf16


def scaled_names(inner: Any) -> tuple[str, ...]:
    """Return the names of the state of ``inner`` that has scales."""
    return tuple(name for name, dtype in _types(inner).items() if dtype is torch.float16 or dtype.itemsize == 1)


def types_of(inner: Any, param: torch.Tensor) -> dict[str, torch.dtype]:
    """Return names and types of the state that the first step of ``param`` creates."""
    types = _types(inner)
    if MASTER in types and _has_remainder(inner, param):
        types[MASTER] = torch.int16
    return types


def create_missing(inner: Any, state: OptimizerState) -> None:
    """Create state that a checkpoint is going to be loaded into, and offload it, one parameter at a time."""
    params = [param for group in inner.param_groups for param in group["params"] if not inner.state.get(param)]
    for param in params:
        with state.on_device(param, MAIN):
            # Megatron's own call lacks an argument.
            inner.initialize_state(param, _has_remainder(inner, param))
        if param in state.offloaded:
            state.store(state.offloaded[param])


def _types(inner: Any) -> dict[str, torch.dtype]:
    types = dict(getattr(inner, TYPES, {}))
    if not getattr(inner, "master_weights", False):
        types.pop(MASTER, None)
    return types


def _has_remainder(inner: Any, param: torch.Tensor) -> bool:
    return bool(inner.store_param_remainders) and param.dtype is torch.bfloat16
