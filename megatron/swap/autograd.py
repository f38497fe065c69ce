"""The edge to autograd: boundary functions around a layer, and what stands in the graph for a saved tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from megatron.swap.footprint import FootprintMeter
from megatron.swap.group import Group
from megatron.swap.handle import Alias, Handle, alias_of
from megatron.swap.made import of_tensors_alone
from megatron.swap.manager import SwapManager
from megatron.swap.observer import Hooks, Observer
from megatron.swap.recipes import Packing, Recipe, Recipes
from megatron.swap.recorder import Recorder
from megatron.swap.recording import OutsideStorage, SavedStorage
from megatron.swap.sites import CHECKPOINT_PATH, LOSS_PATH, MODEL_PATH, SiteNames
from megatron.swap.trace import Ranges
from megatron.swap.types import Action, Place, Site, UsageError


@dataclass(frozen=True, slots=True)
class Layout:
    """How to see a tensor in its storage; ``offset`` and ``stride`` in elements."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """What autograd keeps instead of a tensor: its storage's handle, and how to see the tensor in that storage."""

    handle: Handle
    group: Group
    index: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class RecomputedTensor:
    """What autograd keeps instead of a tensor whose storage is made again, and held by nobody until then."""

    recipe: Recipe
    layout: Layout


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


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """What autograd keeps for a tensor of a group that the policy left on the device.

    It knows its group so that backward is noticed even where nothing of a group was taken and no boundary stands (the
    last segments of full recomputation): then the prefetch of the next ones begins.
    """

    alias: Alias
    group: Group


Packed = PackedTensor | RecomputedTensor | KeptTensor | Alias | torch.Tensor
"""What stands in the graph: for a tensor that was taken, for one that is made again, for two kinds that stay, for a
subclass left untouched."""


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """What autograd keeps while a recorder is on: what it would keep without, and the recorder's record."""

    packed: Packed
    record: SavedStorage | OutsideStorage


def kept(tensor: torch.Tensor) -> Alias | torch.Tensor:
    """What stands in the graph for a tensor that stays.

    Not the tensor itself: a node that saves its own output would hold itself, and never be freed; and with the hooks
    autograd's check for in-place changes is gone, so ours needs the version.
    """
    return alias_of(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _Leave(torch.autograd.Function):
    """Stands behind a layer; its backward runs before any of the layer's."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, enter: Callable[[], None]) -> torch.Tensor:
        ctx.enter = enter
        # Neither ``hidden`` itself nor a view: Megatron frees a stage's output after sending it and insists on a tensor
        # without a base.
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.enter()
        return grad, None


def _tell_end_of_backward(ranges: Ranges, group: Group, hidden: Any) -> None:
    """A layer's backward is over when the gradient of its input, the hidden states, is there."""
    if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
        hidden.register_hook(lambda grad: ranges.backward_over(group))


class SavedTensors:
    """Pack and unpack: what autograd saves goes to the manager, as far as it is ours and the policy wants it.

    Args:
        manager: swaps storages.
        device: whose tensors are ours.
        observer: counts what autograd holds.
        recipes: what is made again instead; ``None``: nothing is.
        recorder: where what is saved is recorded while it is on.
        on_saved: told of every saved tensor that has a site: the site, its storage, what was done with it.

    Attributes:
        footprint: counts what layers save.
    """

    def __init__(
        self,
        manager: SwapManager,
        device: torch.device,
        observer: Observer | None = None,
        recipes: Recipes | None = None,
        recorder: Recorder | None = None,
        on_saved: Callable[[Site, torch.UntypedStorage, Action], None] | None = None,
    ) -> None:
        self.footprint = FootprintMeter()
        self._recorder = recorder
        if recorder is not None and recipes is not None:
            recipes.on_recipe = recorder.recomputed
        self._manager = manager
        self._device = device
        self._observer = observer
        self._recipes = recipes
        self._on_saved = on_saved
        hooks = Hooks(kept, self.unpack)
        self._unpack_input = (hooks if observer is None else observer.around(hooks)).unpack

    def watching(self) -> AbstractContextManager[None]:
        """A context, around a layer's forward, in which recipes are looked for."""
        return nullcontext() if self._recipes is None else self._recipes.watching()

    def called_with(self, group: Group, hidden: Any) -> None:
        """The hidden states that a layer begins with."""
        if self._recorder is not None:
            self._recorder.called_with(group.label, hidden)

    def hooks(
        self, where: Callable[[], tuple[Group, Site] | None], constants: Collection[int] = ()
    ) -> AbstractContextManager[Any]:
        """A context in which what autograd saves is ours.

        Args:
            where: asked for every tensor that comes into question; its group and site, or ``None`` to leave it.
            constants: addresses of storages that stay, whatever the policy says (parameters).
        """

        def is_constant(tensor: torch.Tensor) -> bool:
            return stays_by_nature(tensor, self._device) or tensor.untyped_storage()._cdata in constants

        recorder = self._recorder if self._recorder is not None and self._recorder.on else None

        def pack(tensor: torch.Tensor) -> Packed | RecordedTensor:
            place = None if is_constant(tensor) else where()
            if place is None:
                return kept(tensor)
            group, site = place
            self.footprint.add(tensor.untyped_storage().nbytes())
            record = None if recorder is None else recorder.saved(site, group.label, tensor)
            packed = pack_in(group, site, tensor)
            if self._on_saved is not None:
                self._on_saved(site, tensor.untyped_storage(), _action_of(packed))
            return packed if record is None else RecordedTensor(packed, record)

        def pack_in(group: Group, site: Site | None, tensor: torch.Tensor) -> Packed:
            if self._recipes is not None:
                join = lambda needed: kept(needed) if is_constant(needed) else pack_in(group, None, needed)  # noqa: E731
                packing = Packing(is_constant, join, partial(hold, group, site))
                recipe = self._recipes.take(tensor, site, group, packing)
                if recipe is not None:
                    return RecomputedTensor(recipe, Layout.of(tensor))
            return hold(group, site, tensor)

        def hold(group: Group, site: Site | None, tensor: torch.Tensor) -> Packed:
            if recorder is not None:
                recorder.aliased(tensor)
            taken = self._manager.take(tensor, site, group)
            if taken is None:
                return KeptTensor(alias_of(tensor), group)
            return PackedTensor(taken[0], group, taken[1], Layout.of(tensor))

        return self._enter(Hooks(pack, self.unpack))

    def staying(self, group: Group, constants: Collection[int]) -> AbstractContextManager[Any]:
        """A context in which everything stays, and the manager knows how much that is; ``constants`` as above."""

        def pack(tensor: torch.Tensor) -> Packed:
            if not stays_by_nature(tensor, self._device) and tensor.untyped_storage()._cdata not in constants:
                self.footprint.add(tensor.untyped_storage().nbytes())
                self._manager.claim(tensor.untyped_storage(), group)
            return kept(tensor)

        return self._enter(Hooks(pack, self.unpack))

    @property
    def recording(self) -> bool:
        """Whether what a forward saves now is recorded."""
        return self._recorder is not None and self._recorder.on and torch.is_grad_enabled()

    def outside(self, names: SiteNames) -> AbstractContextManager[Any]:
        """A context around the forward of a chunk, while recording: what its layers do not save is noted, and stays."""
        recorder = self._recorder
        assert recorder is not None
        names.begin()
        own = [tensor for module in names.modules for tensor in (*module.parameters(False), *module.buffers(False))]
        constants = {tensor.untyped_storage()._cdata for tensor in own}

        def pack(tensor: torch.Tensor) -> Packed | RecordedTensor:
            packed = kept(tensor)
            if stays_by_nature(tensor, self._device) or tensor.untyped_storage()._cdata in constants:
                return packed
            site = names.next_site(LOSS_PATH if recorder.behind_layers else MODEL_PATH)
            record = recorder.saved_outside(site, tensor)
            return packed if record is None else RecordedTensor(packed, record)

        return self._enter(Hooks(pack, self.unpack))

    def untouched(self, *, observed: bool = True) -> AbstractContextManager[Any]:
        """A context in which everything stays, whatever hooks stand around it."""
        return self._enter(Hooks(kept, self.unpack), observed)

    def _enter(self, hooks: Hooks, observed: bool = True) -> AbstractContextManager[Any]:
        if observed and self._observer is not None:
            hooks = self._observer.around(hooks)
        return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)

    def unpack(self, packed: Packed | RecordedTensor) -> torch.Tensor:
        """The tensor as it was saved: same bytes, offset, shape and stride.

        Raises:
            RuntimeError: it was changed in place since, as autograd raises without hooks.
        """
        if isinstance(packed, RecordedTensor):
            assert self._recorder is not None
            self._recorder.asked(packed.record)
            packed = packed.packed
        if isinstance(packed, torch.Tensor):
            return packed
        if isinstance(packed, KeptTensor):
            self._manager.begin_backward(packed.group)
            packed = packed.alias
        if isinstance(packed, Alias):
            packed.check("a saved tensor that stayed on the device")
            return packed.tensor
        if isinstance(packed, RecomputedTensor):
            assert self._recipes is not None
            self._manager.begin_backward(packed.recipe.group)
            storage = self._recipes.make(packed.recipe, self._unpack_input)
        else:
            storage = self._manager.fetch(packed.handle, packed.group, packed.index)
        if self._recorder is not None:
            self._recorder.used(storage)
        return packed.layout.view(storage)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _action_of(packed: Packed) -> Action:
    """What was done with a tensor, by what stands in the graph for it."""
    if isinstance(packed, RecomputedTensor):
        return Action.RECOMPUTE
    return Action.SWAP if isinstance(packed, PackedTensor) and not packed.handle.is_kept else Action.KEEP


def put_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """``module`` runs ``forward`` from now on. Returns what gives it its own back: its class's, or that which another
    library has put there."""
    own = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]

    def take_off() -> None:
        del module.forward
        if own is not None:
            module.forward = own  # type: ignore[method-assign]

    return take_off


class LayerBoundary:
    """Replaces the ``forward`` of one layer by one that swaps what the layer saves.

    Args:
        layer: number of the layer over the whole model, 0-based.
        module: the layer; it returns its new hidden states, alone or first in a tuple.
        hooked: False for a layer that stays whole: then it only marks where backward has got to.
        place: where the layer stands in the forward of its chunk.
        on_run_without_grad: told of the layer's number when it runs without gradients.
        checkpoint: for a layer that runs again as a whole: calls a function with tensors, and once more in backward,
            with the same random numbers; it saves those tensors alone. ``None``: the layer runs once.
        is_idle: whether nothing is to be done in this forward: then the layer runs as if we were not there.
    """

    def __init__(
        self,
        layer: int,
        module: nn.Module,
        manager: SwapManager,
        saved_tensors: SavedTensors,
        *,
        hooked: bool,
        place: Place,
        on_run_without_grad: Callable[[int], None] | None = None,
        checkpoint: Callable[..., Any] | None = None,
        is_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.layer = layer
        self._is_idle = is_idle
        self._checkpoint = checkpoint
        self.module = module
        self._manager = manager
        self._saved_tensors = saved_tensors
        self._place = place
        self._on_run_without_grad = on_run_without_grad
        self._names = SiteNames(layer, module) if hooked else None
        self._constants = [*module.parameters(), *module.buffers()]
        self._inner = module.forward
        self._take_off = put_forward(module, self._forward)

    def stand_at(self, place: Place, checkpoint: Callable[..., Any] | None = None) -> None:
        """From the next forward on this is where the layer stands, and by what it runs again, if as a whole."""
        self._place = place
        self._checkpoint = checkpoint

    def remove(self) -> None:
        """Give the layer its own forward back."""
        if self._names is not None:
            self._names.remove()
        self._take_off()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward():
            # A recomputation: its graph lives an instant. Hooks that stand around it must see the same as in forward,
            # where ours hid the layer from them. The observer does not look into backward without us either.
            with self._saved_tensors.untouched(observed=False):
                return self._inner(*args, **kwargs)
        if not torch.is_grad_enabled():
            if self._on_run_without_grad is None:
                return self._inner(*args, **kwargs)
            self._on_run_without_grad(self.layer)
            # Megatron computes bias, dropout and residual with gradients even here; what that saves dies at once.
            with self._manager.ranges.forward(self.layer), self._saved_tensors.untouched():
                return self._inner(*args, **kwargs)
        manager, footprint = self._manager, self._saved_tensors.footprint
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        footprint.begin_layer(self.layer, hidden.nbytes if isinstance(hidden, torch.Tensor) else 0)
        if self._is_idle() and not manager.ranges.on:  # asked now: a larger input may just have changed that
            result = self._inner(*args, **kwargs)
            footprint.end_layer(self.layer, unseen=True)
            return result
        with manager.ranges.forward(self.layer):
            group = manager.begin_forward(self.layer, self._place)
            if manager.ranges.on:
                _tell_end_of_backward(manager.ranges, group, hidden)
                self._saved_tensors.called_with(group, hidden)
            with self._saved_tensors_context(group):
                result = self._run(group, args, kwargs)
            footprint.end_layer(self.layer, unseen=self._checkpoint is not None)
            manager.end_forward(group)
        return self._mark(result, lambda: manager.begin_backward(group))

    def _mark(self, result: Any, enter: Callable[[], None]) -> Any:
        """What the layer returned, so that ``enter`` is called when backward comes to it, before any of the layer's."""
        if isinstance(result, tuple):
            return (_Leave.apply(result[0], enter), *result[1:])
        return _Leave.apply(result, enter)

    def _run(self, group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._checkpoint is None:
            return self._inner(*args, **kwargs)
        ranges = self._manager.ranges

        def run(*args: Any, **kwargs: Any) -> Any:
            again = in_backward()
            with (
                ranges.storage("recompute", group) if again else nullcontext(),
                self._saved_tensors.untouched(observed=not again),
            ):
                return self._inner(*args, **kwargs)

        # What needs no gradient (masks, tables of angles) is there anyway.
        function, tensors = of_tensors_alone(run, args, kwargs, _needs_gradient)
        if not tensors and not any(parameter.requires_grad for parameter in self.module.parameters()):
            return self._inner(*args, **kwargs)  # a frozen layer before all that is trained saves nothing
        if not tensors:
            raise UsageError(
                f"layer {self.layer} is to be recomputed whole, but its input needs no gradient (frozen embeddings?): "
                "its weights would get none either. Recompute single sites of it, or a later layer."
            )
        return self._checkpoint(function, *tensors)

    def _saved_tensors_context(self, group: Group) -> AbstractContextManager[Any]:
        # Read anew each time: Megatron moves parameters into its buffers after the model is built.
        constants = frozenset(tensor.untyped_storage()._cdata for tensor in self._constants)
        names = self._names
        if self._checkpoint is not None:
            ordinals = count()
            where = lambda: (group, Site(self.layer, CHECKPOINT_PATH, next(ordinals)))  # noqa: E731
            return self._saved_tensors.hooks(where, constants)
        if names is None:
            return self._saved_tensors.staying(group, constants)
        names.begin()
        stack = ExitStack()
        stack.enter_context(self._saved_tensors.watching())
        stack.enter_context(self._saved_tensors.hooks(lambda: (group, names.next_site()), constants))
        return stack
