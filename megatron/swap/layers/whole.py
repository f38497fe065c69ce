"""A layer that runs again in backward: in torch's checkpoint, or in the checkpoint of its framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from megatron.swap.engine.layer_state import StateReader
from megatron.swap.engine.overrides import in_backward
from megatron.swap.engine.producer_records import of_tensors_alone
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.layers.makers import Makers
from megatron.swap.layers.run import LayerRun, Rerun
from megatron.swap.operators.kinds import has_atomics

torch_checkpoint = partial(checkpoint, use_reentrant=False)  # of layers that have none of their own


def run_in_torchs(
    module: nn.Module, run: LayerRun, call: Callable[..., Any], saved_tensors: SavedTensors, reader: StateReader,
    makers: Makers,
) -> Any:  # fmt: skip
    """Run a layer, whose own forward is ``call``, in torch's checkpoint, which restores random states and autocast."""
    leaves, structure = _pytree.tree_flatten([list(run.args), run.kwargs])
    indices = [i for i, leaf in enumerate(leaves) if run.is_input(leaf)]
    inputs = [leaves[i] for i in indices]
    others = [None if i in indices else leaf for i, leaf in enumerate(leaves)]
    first: Callable[..., Any] = partial(makers.run_watched if makers.must_watch(run) else makers.run_unwatched, run)
    # The checkpoint restores the random numbers of the devices of its arguments: there is always one on this.
    device = saved_tensors.device
    on_device = torch.empty(0, device=device)
    order, name = makers.order(run), f"layer {run.number} ({type(module).__name__})"
    places = None if order is None or order.needs != makers.needs(run) else order.compared
    checked = saved_tensors.checked_run(
        (module, run.nth), name, reader.read(one for one in others if one is not None),
        saved=places and places.last, in_turn=places and places.all, num_saved=places and places.num_saved,
        sees_saved=True,
        # Where the operators are not known, two runs tell whether kernels are deterministic: never a guess.
        is_exact=device.type != "cuda" or order is None or not has_atomics(order.operators),
        forked=_forked_random_states(device),
    )  # fmt: skip
    group, ranges = run.group, saved_tensors.manager.ranges

    def body(_: torch.Tensor, *tensors: torch.Tensor) -> Any:
        full = list(others)
        for i, tensor in zip(indices, tensors, strict=True):
            full[i] = tensor
        again_args, again_kwargs = _pytree.tree_unflatten(full, structure)
        with ranges.storage("recompute", group) if in_backward() else nullcontext():
            return checked(call if in_backward() else first, *again_args, **again_kwargs)

    contexts = lambda: (nullcontext(), saved_tensors.counting())  # noqa: E731
    result = torch_checkpoint(body, on_device, *inputs, context_fn=contexts)
    first = call  # the checkpoint holds ``body`` until backward, which must not hold the run: that has the inputs
    return result


def run_in_frameworks(
    module: nn.Module, run: LayerRun, call: Callable[..., Any], saved_tensors: SavedTensors, reader: StateReader,
    rerun: Rerun,
) -> Any:  # fmt: skip
    """Run a layer in the checkpoint of its framework, which is reentrant: it runs without gradients in forward."""
    assert run.checkpoint is not None
    others = [one for one in (*run.args, *run.kwargs.values()) if not _needs_gradient(one)]
    checked = saved_tensors.checked_run(
        module, f"layer {run.number}", reader.read(others), sees_saved=False,
        may_have_gradients=rerun.may_have_gradients, is_well_known=rerun.is_well_known, forked=rerun.forked,
    )  # fmt: skip
    group, ranges = run.group, saved_tensors.manager.ranges

    def body(*args: Any, **kwargs: Any) -> Any:
        again = in_backward()
        with (
            ranges.storage("recompute", group) if again else rerun.first_run(),
            saved_tensors.untouched(observed=not again),
        ):
            return checked(call, *args, **kwargs)

    # Tensors that need no gradient (masks, rotary angles) stay on the device anyway.
    function, tensors = of_tensors_alone(body, run.args, run.kwargs, _needs_gradient)
    if not tensors and not any(parameter.requires_grad for parameter in module.parameters()):
        return call(*run.args, **run.kwargs)  # a frozen layer before all trained ones saves nothing
    if not tensors:  # frozen embeddings, or a batch without images: the layer's weights would get no gradient
        function, tensors = of_tensors_alone(body, run.args, run.kwargs, lambda value: value is run.hidden)
        tensors = [_NeedsGradient.of(tensor) for tensor in tensors]
    function, tensors = _with_layouts(function, tensors)
    return run.checkpoint(function, *tensors)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _forked_random_states(device: torch.device) -> Callable[[], AbstractContextManager[None]] | None:
    """Return a function whose context restores random states at its end, or None in a dry run."""
    if device.type == "meta":
        return None
    return partial(torch.random.fork_rng, [] if device.type == "cpu" else [device], device_type=device.type)


class _NeedsGradient(torch.autograd.Function):
    """Makes a tensor that needs no gradient an input of a checkpoint, whose backward autograd then enters."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Any:
        """Return ``tensor`` as one that needs a gradient, which is dropped."""
        # No leaf: autograd would hold a leaf, and offloading it would free nothing.
        return cls.apply(tensor, torch.empty(0, device=tensor.device, requires_grad=True))

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        return None, None


class _SeesLayout(torch.autograd.Function):
    """Identity in a layer that runs again: notes the strides of the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: list[tuple[int, ...]]) -> torch.Tensor:
        ctx.layout = layout
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.layout[:] = [] if torch._debug_has_internal_overlap(grad) else [grad.stride()]  # it was expanded
        return grad, None


class _HandsOn(torch.autograd.Function):
    """Identity before a checkpoint: its gradient gets the strides that it had in the layer."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: list[tuple[int, ...]]) -> torch.Tensor:
        ctx.layout = layout
        ctx.set_materialize_grads(False)  # an input that the layer does not use gets none
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        # A reentrant checkpoint takes the gradient from a leaf, with the leaf's strides. Without a checkpoint autograd
        # hands it on as it is. Sums over it (a bias's gradient) depend on its strides in their last bits.
        if grad is not None and ctx.layout and (strides := ctx.layout[0]) != grad.stride():
            grad = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad, None


def _with_layouts(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a layer and its inputs, for a checkpoint that hands on gradients with the strides of the layer."""
    layouts: list[list[tuple[int, ...]]] = [[] for _ in tensors]

    def noting(*given: torch.Tensor) -> Any:
        if in_backward():
            given = tuple(map(_SeesLayout.apply, given, layouts))
        return function(*given)

    return noting, list(map(_HandsOn.apply, tensors, layouts))
