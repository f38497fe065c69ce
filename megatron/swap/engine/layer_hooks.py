"""The boundary around a layer: replaces its ``forward``, and is called before backward enters the layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

import torch
from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.site_paths import CHECKPOINT_PATH
from megatron.swap.common.types import LayerPosition, Site, UsageError
from megatron.swap.devices.plain_tensors import addresses_of
from megatron.swap.engine.handle import Group
from megatron.swap.engine.layer_state import Attributes, LayerState, StateReader
from megatron.swap.engine.producer_records import of_tensors_alone
from megatron.swap.engine.run_snapshot import RunSnapshot
from megatron.swap.engine.saved_tensors import LayerPacker, SavedTensors
from megatron.swap.engine.sites import SiteNames


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread: a forward at this moment is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _BoundaryFunction(torch.autograd.Function):
    """Identity after a layer; its backward runs before any backward of the layer."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, on_backward: Callable[[], None]) -> torch.Tensor:
        ctx.on_backward = on_backward
        # Neither ``hidden`` itself nor a view: Megatron frees a stage's output after sending it and asserts that it
        # has no base.
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.on_backward()
        return grad, None


class _NeedsGradient(torch.autograd.Function):
    """Makes a tensor that needs no gradient an input of a checkpoint, whose backward autograd then enters.

    It is no leaf: autograd would hold a leaf, and offloading it would free nothing.
    """

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Any:
        """Return ``tensor`` as one that needs a gradient, which is dropped."""
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
    """Identity before a checkpoint: its gradient gets the strides that it had in the layer.

    A reentrant checkpoint takes it from a leaf, where autograd lays it out as the leaf. Without a checkpoint it is
    handed on as it is, and sums over it (a bias's gradient) depend on its strides in their last bits.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: list[tuple[int, ...]]) -> torch.Tensor:
        ctx.layout = layout
        ctx.set_materialize_grads(False)  # an input that the layer does not use gets none
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
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


def _mark_end_of_backward(ranges: Ranges, group: Group, hidden: Any) -> None:
    """End the layer's backward range once the gradient of its input, the hidden states, is computed."""
    if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
        hidden.register_hook(lambda grad: ranges.backward_over(group))


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def override_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Replace the forward of ``module`` by ``forward``. Return a function that restores the previous one."""
    return override_method(module, "forward", forward)


def override_method(module: nn.Module, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace the method ``name`` of ``module`` by ``function``. Return a function that restores the previous one.

    The previous one is the class's, or one that another library has set on the instance. A wrapper that somebody puts
    around ours stays.
    """
    own, override = vars(module).get(name), _Override(function, getattr(module, name))
    setattr(module, name, override)

    def restore() -> None:
        override.is_on = False
        if vars(module).get(name) is not override:
            return  # somebody has wrapped it since: it passes calls on
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)

    return restore


class NotCopied:
    """Base of objects that belong to one model. A copy of them, or of that model, would share its hooks and memory."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a model that is swapped can be neither copied nor pickled (deepcopy, AveragedModel, torch.save): do that "
            "before it is swapped, or after close(). Its state_dict() can."
        )

    def _refuse_copies_of(self, module: nn.Module) -> Callable[[], None]:
        """Refuse copies of ``module``, before what hangs on it is copied. Return a function that allows them again."""
        return override_method(module, "__reduce_ex__", self.__reduce_ex__)


def has_boundary(module: nn.Module) -> bool:
    """Whether a layer's boundary replaces the forward of ``module``, under whatever replaces it since."""
    override = vars(module).get("forward")
    while isinstance(override, _Override):
        if override.is_on and isinstance(getattr(override.function, "__self__", None), LayerBoundary):
            return True
        override = override.inner
    return False


class _Override:
    """Calls ``function``, or ``inner`` once it is off. It is no function: a copy would swap with the original."""

    def __init__(self, function: Callable[..., Any], inner: Callable[..., Any]) -> None:
        self.function = function
        self.inner = self.__wrapped__ = inner  # whoever asks for the signature gets that of ``inner``
        self.is_on = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self.function if self.is_on else self.inner)(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class BoundaryOptions:
    """Options of a layer's boundary.

    Attributes:
        hooked: False for a layer that keeps everything: the boundary then only marks the progress of backward.
        on_run_without_grad: called with the layer's number when the layer runs without gradients.
        is_idle: asked before each forward; if true, the layer runs as if it had no boundary.
        attributes: as for ``StateReader``.
        forked, may_have_gradients, is_well_known: as for ``RunChecks.run``.
        first_run: makes a context for the run in forward of a layer that runs again.
    """

    hooked: bool
    on_run_without_grad: Callable[[int], None] | None = None
    is_idle: Callable[[], bool] = lambda: False
    attributes: Attributes = lambda _: None
    forked: Callable[[], AbstractContextManager[None]] | None = None
    may_have_gradients: bool = False
    is_well_known: bool = False
    first_run: Callable[[], AbstractContextManager[Any]] = nullcontext


class LayerBoundary(NotCopied):
    """Replaces the ``forward`` of one layer by one that handles the layer's saved tensors.

    Args:
        layer: number of the layer over the whole model, 0-based.
        module: the layer; it returns its new hidden states, alone or first in a tuple.
        saved_tensors: the engine's hooks.
        position: the layer's position in the forward of its chunk.
        options: see ``BoundaryOptions``.
        checkpoint: for a layer that is recomputed whole. It calls a function with tensors, and again in backward with
            the same random numbers; it saves only these tensors. ``None``: the layer runs once.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        saved_tensors: SavedTensors,
        position: LayerPosition,
        options: BoundaryOptions,
        checkpoint: Callable[..., Any] | None = None,
    ) -> None:
        self.layer = layer
        self.module = module
        self._options = options
        self._checkpoint = checkpoint
        self._manager = saved_tensors.manager
        self._saved_tensors = saved_tensors
        self._position = position
        self._names = SiteNames(layer, module) if options.hooked else None
        self._sources: dict[int, Site] | None = None  # of the present forward, as for ``SavedTensors.hooks``
        self._on_recomputed: Callable[[Collection[int]], None] | None = None  # as for ``Recomputer.recording``
        self._make_packer: Callable[..., LayerPacker] | None = None  # as for ``SavedTensors.hooks``
        self._constants = [*module.parameters(), *module.buffers()]
        self._weight_shapes = frozenset(one.shape for one in module.parameters() if one.dim() > 1)
        self._reader = StateReader(module, options.attributes)
        self._before: LayerState | None = None  # of the run that has just ended, while steps are measured
        self._inner = module.forward
        self._restore = override_forward(module, self._forward)
        self._allow_copies = self._refuse_copies_of(module)

    def set_position(self, position: LayerPosition, checkpoint: Callable[..., Any] | None = None) -> None:
        """Set the position and ``checkpoint`` that hold from the next forward on."""
        self._position = position
        self._checkpoint = checkpoint

    def remove(self) -> None:
        """Restore the layer's own forward."""
        if self._names is not None:
            self._names.remove()
        self._allow_copies()
        self._restore()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            # A recomputation: its graph is freed at once. Outer hooks must see the same as in forward, where the
            # boundary's hooks hide the layer from them. The observer does not count recomputations.
            with self._saved_tensors.untouched(observed=False):
                return self._inner(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._manager.collect_if_empty()  # an evaluation behind a graph that was dropped
            if self._options.on_run_without_grad is None:
                return self._inner(*args, **kwargs)
            self._options.on_run_without_grad(self.layer)
            # Megatron computes bias, dropout and residual with gradients even here; what they save is freed at once.
            with self._manager.ranges.forward(self.layer), self._saved_tensors.untouched():
                return self._inner(*args, **kwargs)
        manager, footprint = self._manager, self._saved_tensors.footprint
        hidden = self._hidden(args, kwargs)
        is_tensor = isinstance(hidden, torch.Tensor)  # a sparse one has no ``nbytes``
        footprint.begin_layer(self.layer, hidden.numel() * hidden.element_size() if is_tensor else 0)
        if self._options.is_idle() and not manager.ranges.is_on:  # asked now: a larger input may just have changed that
            result = self._inner(*args, **kwargs)
            footprint.end_layer(self.layer, is_unseen=True)
            return result
        with manager.ranges.forward(self.layer):
            group = manager.begin_forward(self.layer, self._position)
            if manager.ranges.is_on:
                _mark_end_of_backward(manager.ranges, group, hidden)
                self._note_inputs(group, hidden, args, kwargs)
            with self._saved_tensors_context(group):
                result = self._run(group, args, kwargs)
            footprint.end_layer(self.layer, is_unseen=self._checkpoint is not None)
            manager.end_forward(group)
        before, self._before = self._before, None
        if before is None:
            return self._mark(result, lambda: manager.begin_backward(group))

        def on_backward() -> None:
            if not before.can_be_put_back():
                self._saved_tensors.not_repeatable(group)
            manager.begin_backward(group)

        return self._mark(result, on_backward)

    def _note_snapshot(self, before: RunSnapshot, group: Group) -> bool:
        """Note, for the recording of the run that has ended, whether the layer may run again. Return it."""
        is_repeatable = before.is_unchanged() and not self._saved_tensors.must_run_once
        if not is_repeatable:  # such as batch norm, which counts what it has seen
            self._saved_tensors.not_repeatable(group)
        else:
            self._before = before.state
        return is_repeatable

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the hidden states among the arguments of the layer."""
        return kwargs.get("hidden_states", args[0] if args else None)

    def _note_inputs(self, group: Group, hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note, for the recording of this run, what the layer is called with."""
        self._saved_tensors.called_with(group, hidden)

    def _mark(self, result: Any, on_backward: Callable[[], None]) -> Any:
        """Return ``result`` with a hook: ``on_backward`` is called before backward enters the layer."""
        if isinstance(result, tuple):
            return (_BoundaryFunction.apply(result[0], on_backward), *result[1:])
        return _BoundaryFunction.apply(result, on_backward)

    def _run(self, group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._checkpoint is None:
            if self._saved_tensors.active_recorder is None:
                return self._inner(*args, **kwargs)
            before = RunSnapshot(self._reader, args, kwargs)
            result = self._inner(*args, **kwargs)
            self._note_snapshot(before, group)
            return result
        ranges = self._manager.ranges
        others = [one for one in (*args, *kwargs.values()) if not _needs_gradient(one)]
        checked = self._saved_tensors.checked_run(
            self.module, f"layer {self.layer}", self._reader.read(others), sees_saved=False,
            may_have_gradients=self._options.may_have_gradients, is_well_known=self._options.is_well_known,
            forked=self._options.forked,
        )  # fmt: skip

        def run(*args: Any, **kwargs: Any) -> Any:
            again = in_backward()
            with (
                ranges.storage("recompute", group) if again else self._options.first_run(),
                self._saved_tensors.untouched(observed=not again),
            ):
                return checked(self._inner, *args, **kwargs)

        # Tensors that need no gradient (masks, rotary angles) stay on the device anyway.
        function, tensors = of_tensors_alone(run, args, kwargs, _needs_gradient)
        if not tensors and not any(parameter.requires_grad for parameter in self.module.parameters()):
            return self._inner(*args, **kwargs)  # a frozen layer before all trained ones saves nothing
        if not tensors:  # frozen embeddings, or a batch without images: the layer's weights would get no gradient
            hidden = self._hidden(args, kwargs)
            function, tensors = of_tensors_alone(run, args, kwargs, lambda value: value is hidden)
            tensors = [_NeedsGradient.of(tensor) for tensor in tensors]
        function, tensors = _with_layouts(function, tensors)
        return self._checkpoint(function, *tensors)

    def _saved_tensors_context(self, group: Group) -> AbstractContextManager[Any]:
        # Read in each forward: Megatron moves parameters into its buffers after the model is built.
        constants = addresses_of(self._constants)
        names = self._names
        if self._checkpoint is not None:
            ordinals = count()
            where = lambda: (group, Site(self.layer, CHECKPOINT_PATH, next(ordinals)))  # noqa: E731
            return self._saved_tensors.hooks(where, constants, self._weight_shapes)
        if names is None:
            return self._saved_tensors.keeping(group, constants, self._weight_shapes)
        names.begin()
        stack = ExitStack()
        stack.enter_context(self._saved_tensors.recording(self.layer, self._on_recomputed))
        where = lambda: (group, names.next_site())  # noqa: E731
        shapes = self._weight_shapes
        stack.enter_context(self._saved_tensors.hooks(where, constants, shapes, self._sources, self._make_packer))
        return stack
