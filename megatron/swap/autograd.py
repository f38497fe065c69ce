"""The edge to autograd: boundary functions around a layer, and what stands in the graph for a saved tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.swap.group import Group
from megatron.swap.handle import Handle
from megatron.swap.manager import SwapManager
from megatron.swap.observer import PLAIN, Hooks, Observer
from megatron.swap.sites import SiteNames
from megatron.swap.types import Place, Site


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """What autograd keeps instead of a tensor: its storage's handle, and how to see the tensor in that storage."""

    handle: Handle
    group: Group
    index: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


def stays_by_nature(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a saved tensor is none of ours: parameters, other devices, subclasses, anything without plain bytes."""
    return (
        type(tensor) is not torch.Tensor
        or tensor.device != device
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.numel() == 0
    )


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _Enter(torch.autograd.Function):
    """Stands before a layer; its backward runs when that of the layer is over."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, leave: Callable[[], None]) -> torch.Tensor:
        ctx.leave = leave
        # Neither ``hidden`` itself nor a view: Megatron frees a stage's output after sending it and insists on a tensor
        # without a base.
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.leave()
        return grad, None


class _Leave(torch.autograd.Function):
    """Stands behind a layer; its backward runs before any of the layer's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, enter: Callable[[], None]) -> torch.Tensor:
        ctx.enter = enter
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.enter()
        return grad, None


class SavedTensors:
    """Pack and unpack: what autograd saves goes to the manager, as far as it is ours and the policy wants it."""

    def __init__(self, manager: SwapManager, device: torch.device, observer: Observer | None = None) -> None:
        self._manager = manager
        self._device = device
        self._observer = observer

    def hooks(
        self, where: Callable[[], tuple[Group, Site] | None], constants: Collection[int] = ()
    ) -> AbstractContextManager[Any]:
        """A context in which what autograd saves is ours.

        Args:
            where: asked for every tensor that comes into question; its group and site, or ``None`` to leave it.
            constants: addresses of storages that stay, whatever the policy says (parameters).
        """

        def pack(tensor: torch.Tensor) -> torch.Tensor | PackedTensor:
            if stays_by_nature(tensor, self._device) or tensor.untyped_storage()._cdata in constants:
                return tensor
            place = where()
            if place is None:
                return tensor
            group, site = place
            taken = self._manager.take(tensor, site, group)
            if taken is None:
                return tensor
            handle, index = taken
            return PackedTensor(
                handle, group, index, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
            )

        return self._enter(Hooks(pack, self.unpack))

    def untouched(self) -> AbstractContextManager[Any]:
        """A context in which everything stays, whatever hooks stand around it."""
        return self._enter(PLAIN)

    def _enter(self, hooks: Hooks) -> AbstractContextManager[Any]:
        if self._observer is not None:
            hooks = self._observer.around(hooks)
        return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)

    def unpack(self, packed: torch.Tensor | PackedTensor) -> torch.Tensor:
        """The tensor as it was saved: same bytes, offset, shape and stride."""
        if isinstance(packed, torch.Tensor):
            return packed
        storage = self._manager.fetch(packed.handle, packed.group, packed.index)
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return empty.set_(storage, packed.offset, packed.shape, packed.stride)


class LayerBoundary:
    """Replaces the ``forward`` of one layer by one that swaps what the layer saves.

    Args:
        layer: number of the layer over the whole model, 0-based.
        module: the layer; called with its hidden states first (or as keyword ``hidden_states``), it returns the new
            ones, alone or first in a tuple.
        swapped: False for a layer that stays whole: then it only marks where backward has got to.
        place: where the layer stands in the forward of its chunk.
        on_run_without_grad: told of the layer's number when it runs without gradients.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        manager: SwapManager,
        saved_tensors: SavedTensors,
        *,
        swapped: bool,
        place: Place,
        on_run_without_grad: Callable[[int], None] | None = None,
    ) -> None:
        self.layer = layer
        self._module = module
        self._manager = manager
        self._saved_tensors = saved_tensors
        self._place = place
        self._on_run_without_grad = on_run_without_grad
        self._names = SiteNames(layer, module) if swapped else None
        self._constants = [*module.parameters(), *module.buffers()]
        self._inner = module.forward
        module.forward = self._forward  # type: ignore[method-assign]

    def remove(self) -> None:
        """Give the layer its own forward back."""
        if self._names is not None:
            self._names.remove()
        del self._module.forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            return self._inner(*args, **kwargs)  # full recomputation runs the layer again; its graph lives an instant
        if not torch.is_grad_enabled():
            if self._on_run_without_grad is not None:
                self._on_run_without_grad(self.layer)
            return self._inner(*args, **kwargs)
        manager = self._manager
        group = manager.begin_forward(self.layer, self._place)
        args, kwargs = _with_first_tensor(
            args, kwargs, lambda hidden: _Enter.apply(hidden, lambda: manager.end_backward(group))
        )
        with self._saved_tensors_context(group):
            result = self._inner(*args, **kwargs)
        manager.end_forward(group)
        mark = lambda hidden: _Leave.apply(hidden, lambda: manager.begin_backward(group))  # noqa: E731
        if isinstance(result, tuple):
            return (mark(result[0]), *result[1:])
        return mark(result)

    def _saved_tensors_context(self, group: Group) -> AbstractContextManager[Any]:
        names = self._names
        if names is None:
            return self._saved_tensors.untouched()
        names.begin()
        # Read anew each time: Megatron moves parameters into its buffers after the model is built.
        constants = frozenset(tensor.untyped_storage()._cdata for tensor in self._constants)
        return self._saved_tensors.hooks(lambda: (group, names.next_site()), constants)


def _with_first_tensor(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the layer's hidden states exchanged."""
    if "hidden_states" in kwargs:
        hidden = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": change(hidden)} if isinstance(hidden, torch.Tensor) else kwargs
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs
