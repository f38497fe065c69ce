"""Linear layers in 8 bits that keep no copies of their weights.

TransformerEngine makes two 8-bit layouts of each weight in the first micro-batch of a step and keeps them. Under FSDP2
forward makes only the layout that it reads, and backward makes its own from the parameter. Layers do so here, without
FSDP2. A weight does not change within a step, so its copies are equal to the bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.patches import registry, te_restored_weight

PACKAGE = "transformer_engine.pytorch"
FLAG = "_is_fsdp2"  # Attribute of TransformerEngine's modules: whether FSDP2 has wrapped them. Each forward reads it.


def can_drop(fuses_gradients: bool) -> bool:
    """Return whether the installed TransformerEngine can make copies again, with fused gradients if those are on."""
    return _has_flag() and not (fuses_gradients and registry.find_misfits([te_restored_weight.PATCH]))


def _kinds() -> tuple[Any, ...]:
    """Return the classes of linear layers that make copies; none where TransformerEngine is not imported."""
    package: Any = sys.modules.get(PACKAGE)
    return () if package is None else (package.Linear, package.LayerNormLinear)


def _has_flag() -> bool:
    return all(hasattr(kind, FLAG.removeprefix("_")) for kind in _kinds())


def recompute_weights(chunk: nn.Module) -> Callable[[], None]:
    """Let linear layers make 8-bit weights at each read, or raise a ``UsageError``. Return an undo function."""
    if not _has_flag():
        raise UsageError("--swap-fp8-weights recompute needs transformer_engine>=2.17. Update it, or choose keep.")
    layers = [module for module in chunk.modules() if isinstance(module, _kinds())]  # no experts (GroupedLinear)
    before = [(layer, vars(layer).get(FLAG)) for layer in layers]
    for layer in layers:
        setattr(layer, FLAG, True)
        layer._fp8_workspaces.clear()

    def keep() -> None:
        for layer, was in before:
            if was is None:
                delattr(layer, FLAG)
            else:
                setattr(layer, FLAG, was)

    return keep
