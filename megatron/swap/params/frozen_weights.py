"""Frozen weights in the autograd graph: a layer's backward reads them from the buffer that then holds them.

A linear layer's backward needs its weight. Autograd saves views of weights while the layer runs, when they are in a
device buffer that the next layers take over. So saved-tensor hooks save which weight it was and the view's layout,
and no device memory. Backward gets the same view of the buffer that holds the layer by then.

All other tensors go to the hooks around the layer: those of a checkpoint or of ``swap.activations``, for instance. A
checkpoint counts what is saved, and sees the same in forward and when it recomputes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.swap.common.types import SwapError
from megatron.swap.engine.handle import check_version
from megatron.swap.engine.overrides import override_forward
from megatron.swap.engine.saved_tensors import KeptTensor, Layout, keep
from megatron.swap.params.packed_weights import PLAIN, Block, Layer
from megatron.swap.params.weight_buffers import WeightBuffers
from megatron.swap.profiling.saved_tensor_hooks import Hooks, HooksContext, innermost_hooks


def _unpack_kept(packed: Any) -> torch.Tensor:
    if isinstance(packed, KeptTensor):
        check_version(packed.tensor, packed.version, "a saved tensor of a layer whose weights are swapped")
        return packed.tensor
    return packed  # type: ignore[no-any-return]


KEEPING = Hooks(keep, _unpack_kept)  # for other tensors where there are no hooks around the layer


@dataclass(slots=True)
class SavedWeight:
    """The graph's entry for a view of a frozen weight."""

    layer: Layer
    layout: Layout  # of the view, in a buffer that holds the layer
    block: Block  # the weight's storage
    versions: list[int]  # version counters of the weights on `block` when autograd saved the view


class FrozenForward:
    """Replaces a layer's ``forward``, so that autograd saves its frozen weights, on ``buffers``, as ``SavedWeight``."""

    def __init__(self, module: nn.Module, buffers: WeightBuffers) -> None:
        self._buffers = buffers
        self._inner = module.forward
        self.remove = override_forward(module, self._forward)

    @torch.compiler.disable
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._inner(*args, **kwargs)
        with HooksContext(self._within(innermost_hooks() or KEEPING), has_around=True):
            return self._inner(*args, **kwargs)

    def _within(self, around: Hooks) -> Hooks:
        """Return hooks for the layer's weights, and ``around`` for other tensors."""

        def pack(tensor: torch.Tensor) -> Any:
            return self._saved(tensor) or around.pack(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            return self._view(packed) if type(packed) is SavedWeight else around.unpack(packed)

        return Hooks(pack, unpack)

    def _saved(self, tensor: torch.Tensor) -> SavedWeight | None:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            return None
        buffer = self._buffers.viewed_by(tensor.untyped_storage())
        # The layout of a conjugated or negated view does not tell that it is one: it keeps the buffer's memory.
        if buffer is None or buffer.layer is None or tensor.is_conj() or tensor.is_neg():
            return None
        layout = Layout.of(tensor)
        block = buffer.layer.block_at(layout.offset * layout.dtype.itemsize)
        return SavedWeight(buffer.layer, layout, block, block.versions())

    def _view(self, saved: SavedWeight) -> torch.Tensor:
        layer = saved.layer
        if layer.region is None:
            raise SwapError(
                f"the backward of {layer.name} needs its weights, but this WeightSwap is closed. Close it after the "
                "last backward."
            )
        for weight, version in zip(saved.block.weights.values(), saved.versions, strict=True):
            check_version(weight.tensor, version, f"{weight.name}, frozen and swapped")
        return saved.layout.view(self._buffers.begin_backward(layer).storage)
