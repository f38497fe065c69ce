"""The mark behind a layer: tells when backward enters it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.function_transforms import in_transform, innermost
from megatron.swap.operators.kinds import tensors_in


class _Mark(torch.autograd.Function):
    """Identity behind a layer. Its backward runs before any backward of the layer."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, on_backward: Callable[[], None]) -> torch.Tensor:
        ctx.on_backward = on_backward
        ctx.set_materialize_grads(False)
        # Neither ``tensor`` itself nor a view: Megatron frees a stage's output after sending it and asserts that it
        # has no base.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        ctx.on_backward()
        return grad, None


def mark(
    result: Any, is_given: Callable[[torch.Tensor], bool], on_backward: Callable[[], None], *, is_alone: bool
) -> Any:
    """Return ``result`` of a layer with a mark: ``on_backward`` is called before backward enters the layer.

    Args:
        is_given: whether the layer was called with a tensor.
        is_alone: nobody gets the layer's results but by ``result``. A layer of any model may also store them in an
            attribute or an object of its caller, where a change in place must reach them. So its own nodes tell.
    """
    if is_alone and isinstance(result, torch.Tensor):
        return _marked(result, is_given, on_backward)
    if is_alone and type(result) is tuple and all(one is None or isinstance(one, torch.Tensor) for one in result):
        return tuple([one if one is None else _marked(one, is_given, on_backward) for one in result])
    for tensor in tensors_in(result):  # the caller gets the structure that the layer has made
        _hook(tensor, on_backward)
    return result


def _marked(
    tensor: torch.Tensor, is_given: Callable[[torch.Tensor], bool], on_backward: Callable[[], None]
) -> torch.Tensor:
    if not is_plain(tensor) or in_transform():
        _hook(tensor, on_backward)
    elif tensor.grad_fn is not None:
        # A view, or an input that is handed on, is one with a tensor that others hold: what the caller writes to it in
        # place must reach that tensor. The mark's output would be another one.
        if tensor._base is None and not is_given(tensor):
            return _Mark.apply(tensor, on_backward)
        _hook(tensor, on_backward)
    return tensor


def _hook(tensor: torch.Tensor, on_backward: Callable[[], None]) -> None:
    if (node := innermost(tensor).grad_fn) is not None:
        node.register_prehook(lambda _: on_backward())
