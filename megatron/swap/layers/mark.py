"""Tells when backward enters a layer: a node of autograd on its result, or a hook of the nodes that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.engine.function_transforms import innermost
from megatron.swap.operators.kinds import tensors_in


class _Mark(torch.autograd.Function):
    """Identity behind a layer. Its backward runs before any backward of the layer."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, on_backward: Callable[[], None]) -> torch.Tensor:
        ctx.on_backward = on_backward
        # Neither ``tensor`` itself nor a view: Megatron frees a stage's output after sending it and asserts that it
        # has no base.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.on_backward()
        return grad, None


def mark(result: Any, on_backward: Callable[[], None], *, is_alone: bool) -> Any:
    """Return ``result`` of a layer such that ``on_backward`` is called before backward enters the layer.

    ``is_alone``: the caller gets the layer's results only by ``result``, the hidden states alone or first in a tuple,
    as with a framework's layers.
    """
    if is_alone and isinstance(result, tuple):
        return (_Mark.apply(result[0], on_backward), *result[1:])
    if is_alone:
        return _Mark.apply(result, on_backward)
    # Any other layer may store its results in an attribute or an object of its caller, who then reads no marked tensor.
    # Nor would a change in place of one reach the other. So the same tensors are returned, and their nodes tell.
    for tensor in tensors_in(result):
        if (node := innermost(tensor).grad_fn) is not None:
            node.register_prehook(lambda _: on_backward())
    return result
