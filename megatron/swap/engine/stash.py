"""``stash``: swaps tensors that an autograd function keeps on ``ctx``, where saved-tensor hooks do not see them.

::

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            y, scale = kernel(x, factor)
            ctx.kept = stash(y, scale)          # instead of ctx.y, ctx.scale = y, scale
            return ...

        @staticmethod
        def backward(ctx, grad):
            y, scale = ctx.kept.tensors()
            ...

``ctx.save_for_backward`` does the same, but takes only tensors, and only once in a forward. Stashed tensors are
handled like those that autograd saves itself: by ``--swap-layers``, ``swap.activations``, or any other
``torch.autograd.graph.saved_tensors_hooks``.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.swap.common.types import UsageError


class Stash:
    """Stashed tensors, saved by autograd. They are freed with the stash."""

    __slots__ = ("_end", "_tensors")

    def __init__(self, end: torch.Tensor | None, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        self._end = end  # holds the node, which holds them
        self._tensors = tensors

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors as stashed, offloaded ones reloaded. Raises a ``RuntimeError`` if one was changed."""
        if self._end is None:
            return self._tensors
        node: Any = self._end.grad_fn
        return node.saved_tensors


def stash(*tensors: torch.Tensor) -> Stash:
    """Let autograd save ``tensors``, in the forward of an autograd function or anywhere else.

    Raises:
        UsageError: one of ``tensors`` is not a tensor.
    """
    for given in tensors:
        if not isinstance(given, torch.Tensor):
            raise UsageError(f"stash: tensors are expected, a {type(given).__name__} was given; leave it on ctx.")
    if torch.is_inference_mode_enabled():
        return Stash(None, tensors)  # there is no graph, and no backward
    with torch.enable_grad():
        # A node of a graph that ends here: autograd packs its saved tensors and never runs its backward.
        end = _Node.apply(torch.empty(0, requires_grad=True), *(tensor.detach() for tensor in tensors))
    return Stash(end)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, beginning: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return beginning.detach()
