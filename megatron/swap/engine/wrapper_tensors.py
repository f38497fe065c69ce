"""Wrapper tensors: subclasses without memory of their own around plain ones (quantized values, their scales).

Autograd saves such a tensor as one object. The hooks take it apart by torch's flatten protocol, so that every inner
tensor is kept, offloaded or recomputed by its own storage. Unpack rebuilds the subclass around the returned tensors.

TransformerEngine's modules split most quantized tensors themselves and save plain tensors. Only cached weights, which
must stay as they are, and tensors of attention in 8 bits reach autograd whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.swap.profiling.saved_tensor_hooks import Hooks


@dataclass(frozen=True, kw_only=True)
class WrapperRules:
    """The wrapper tensors that may be taken apart; all others are kept whole."""

    # Classes that rebuild themselves by `__tensor_unflatten__`, whichever tensors are inside.
    kinds: tuple[type[torch.Tensor], ...]
    # Returns names of inner tensors that are computed from the others, or out of date. They are kept: their owner may
    # drop or rebuild them at any time, so a copy would be wasted.
    caches: Callable[[torch.Tensor], Collection[str]] = lambda _: ()

    def take_apart(self, tensor: torch.Tensor, weight_shapes: Collection[torch.Size]) -> WrapperParts | None:
        """Return the parts of ``tensor``, or None if it is kept whole."""
        if not isinstance(tensor, self.kinds) or isinstance(tensor, torch.nn.Parameter):
            return None
        # A wrapper with a shape of the layer's weights may be a quantized weight that its module caches and updates in
        # place.
        if tensor.shape in weight_shapes or not is_traceable_wrapper_subclass(tensor):
            return None
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        if not inner or any(type(one) is not torch.Tensor for one in inner.values()):
            return None
        return WrapperParts(type(tensor), inner, context, tensor.shape, tensor.stride())


@dataclass(slots=True)
class WrapperParts:
    """A wrapper tensor taken apart, and the graph's entry for it."""

    kind: Any
    inner: dict[str, Any]  # inner tensors; packed ones in the graph
    context: Any  # needed by the class beside `inner`
    shape: torch.Size  # of the wrapper, as is the stride
    stride: tuple[int, ...]


def apart(rules: WrapperRules, hooks: Hooks, keeping: Hooks, weight_shapes: Collection[torch.Size]) -> Hooks:
    """Return ``hooks`` that get the inner tensors of wrappers instead of the wrappers; ``keeping`` gets the caches."""

    def pack(tensor: torch.Tensor) -> Any:
        parts = None if type(tensor) is torch.Tensor else rules.take_apart(tensor, weight_shapes)
        if parts is None:
            return hooks.pack(tensor)
        caches = rules.caches(tensor)
        parts.inner = {name: (keeping if name in caches else hooks).pack(one) for name, one in parts.inner.items()}
        return parts

    def unpack(packed: Any) -> torch.Tensor:
        if type(packed) is not WrapperParts:
            return hooks.unpack(packed)
        inner = {name: hooks.unpack(one) for name, one in packed.inner.items()}
        rebuilt: torch.Tensor = packed.kind.__tensor_unflatten__(inner, packed.context, packed.shape, packed.stride)
        return rebuilt

    return Hooks(pack, unpack)
