"""Boundaries around the layers of a model that a planner handles. Runs, not modules, have numbers.

A layer may run several times in a forward, and a model may run its layers in another order than it lists them. So the
first step, which is not recorded, shows which layer runs when. From the second step on the runs of a forward are
numbered in their order, and each has an action of its own.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf, prod
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.plan import Model
from megatron.swap.common.site_paths import CHECKPOINT_PATH, NON_LAYER
from megatron.swap.common.types import LayerPosition, Site, UsageError, layer_positions
from megatron.swap.engine.handle import Alias, Group
from megatron.swap.engine.layer_hooks import BoundaryOptions, in_backward
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.producer_records import version_probe_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.engine.sites import SiteNames
from megatron.swap.nn.module_boundary import ModuleBoundary, in_checkpoint, tensors_in
from megatron.swap.nn.module_weights import computing_devices
from megatron.swap.nn.operator_records import OperatorFollower, OperatorOrder, OperatorRecords, OperatorWatch, is_plain
from megatron.swap.nn.operator_repeats import RepeatedRuns
from megatron.swap.nn.run_snapshot import RunSnapshot, check_unchanged, versions_of


@dataclass(frozen=True)
class LayerRun:
    """One run of a layer in a forward. ``is_whole``: it is recomputed whole in backward."""

    number: int
    position: LayerPosition
    is_whole: bool


class PlannedBoundary(ModuleBoundary):
    """The boundary of a layer whose next run says what is done.

    Args:
        number: of the layer before the order of the runs is known.
        on_run: called when a forward runs the layer; returns the run.

    Attributes:
        has_backward: whether a backward has entered the layer.
        is_entered: whether one has since the last forward of the model began.
        is_apart: the layer runs as if it had no boundary, so that what it saves counts as saved outside the layers.
        is_first_step: it shows the order of the operators, and what is changed in place. Nothing is recomputed.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        saved_tensors: SavedTensors,
        position: LayerPosition,
        options: BoundaryOptions,
        on_run: Callable[[PlannedBoundary, Any], LayerRun],
    ) -> None:
        self._on_run = on_run
        self.has_backward = self.is_entered = self.is_apart = False
        self._graph: weakref.ref[Any] | None = None
        self.is_first_step = True
        self._nth = -1  # of the layer's runs in this forward
        self._orders: dict[int, OperatorOrder] = {}  # of the n-th run
        self._probes: list[tuple[OperatorOrder, int, Alias]] = []  # of storages, by their numbers
        # Outputs to record, by run, under the present policy; None: all. Before a run has shown it there is no entry.
        self._wanted: dict[int, frozenset[int] | None] = {}
        self._repeats = RepeatedRuns()
        self._has_operators = not computing_devices(module)  # offloaded weights are elsewhere in backward
        self._records: OperatorRecords | None = None  # of the present run
        super().__init__(number, module, saved_tensors, position, options)
        self._make_packer = self._repeats.packer

    @torch.compiler.disable
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if in_checkpoint() or (in_backward() and torch.is_grad_enabled()):
            raise UsageError(
                f"{type(self.module).__name__} runs inside an activation checkpoint of the model, and memory_gib plans "
                "what is recomputed. Switch the model's checkpointing off."
            )
        if self.is_apart:
            return self._inner(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_caches(args, kwargs)
            run = self._on_run(self, self._hidden(args, kwargs))
            self.layer = run.number
            self._nth += 1
            if self._names is not None:
                self._names.layer = run.number
            self.set_position(run.position, checkpoint if run.is_whole else None)
            self._note_sources(run, args, kwargs)
        try:
            return super()._forward(*args, **kwargs)
        finally:
            self._records = None
            self._repeats.drop_packer()

    def _refuse_caches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if type(value).__name__.endswith("Cache"):
                raise UsageError(
                    f"{type(self.module).__name__} is called with a {type(value).__name__}, which a layer that runs "
                    "again would fill twice. Call the model with use_cache=False, or without past_key_values."
                )

    def _note_sources(self, run: LayerRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which inputs of the layer operators may be recomputed from."""
        self._sources = {}
        if self._manager.decider.recomputes_layer(run.number):
            for number, tensor in enumerate(filter(is_plain, self._inputs_in(args, kwargs))):
                self._sources[tensor.untyped_storage()._cdata] = Site(run.number, CHECKPOINT_PATH, number)

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = kwargs.get("hidden_states")
        return named if isinstance(named, torch.Tensor) else next(_tensors([args, kwargs]), None)

    def _note_inputs(self, group: Group, hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._saved_tensors.inputs(group, self._inputs_in(args, kwargs))

    def _inputs_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        hidden = self._hidden(args, kwargs)
        return [tensor for tensor in _tensors([args, kwargs]) if _is_input(tensor, hidden)]

    def _mark(self, result: Any, on_backward: Callable[[], None]) -> Any:
        probes, self._probes = self._probes, []

        def begins() -> None:
            self.has_backward = self.is_entered = True
            for order, number, probe in probes:
                if probe.changed():
                    order.last_write[number] = inf
            probes.clear()
            on_backward()

        self._graph = weakref.ref(begins)  # the graph holds it
        return super()._mark(result, begins)

    def begin_forward(self) -> None:
        """Forget the graphs of earlier forwards."""
        self.is_entered, self._graph, self._nth = False, None, -1

    @property
    def has_graph(self) -> bool:
        """Whether the graph of the layer's last run in this forward exists."""
        return self._graph is not None and self._graph() is not None

    def _run(self, group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._checkpoint is not None:
            return self._run_checkpointed(group, args, kwargs)
        if self._saved_tensors.active_recorder is None:
            return self._run_recorded(args, kwargs)
        before = RunSnapshot(self.module, args, kwargs)
        result = self._run_recorded(args, kwargs)
        if not before.is_unchanged():  # such as batch norm, which counts what it has seen
            self._saved_tensors.not_repeatable(group)
        return result

    def _run_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer. If some of what it saves may be recomputed, watch its operators, or record them."""
        recomputer = self._saved_tensors.recomputer
        if recomputer is None or not recomputer.is_recording or not self._has_operators:
            return self._inner(*args, **kwargs)
        order = self._orders.get(self._nth)
        if order is None or self.is_first_step:
            return self._run_watched(recomputer, args, kwargs)
        assert self._sources is not None  # noted as the layer was called
        mode: OperatorFollower
        if self._repeats.is_repeating:
            mode = self._repeats.mode(recomputer, self._sources, order)
        else:
            tensors, wanted = self._tensors_before(args, kwargs), self._wanted.get(self.layer)
            mode = self._records = OperatorRecords(recomputer, self.layer, self._sources, order, tensors, wanted)
        with mode:
            result = self._inner(*args, **kwargs)
        self._repeats.end(mode.is_as_watched)
        if not mode.is_as_watched:  # the next run is watched
            self._records = None
            del self._orders[self._nth]
            self._wanted.pop(self.layer, None)
            recomputer.forget_trials(self.layer)
        return result

    def _saved_tensors_context(self, group: Group) -> AbstractContextManager[Any]:
        is_known = self._nth in self._orders and self._wanted.get(self.layer) is not None and not self.is_first_step
        self._repeats.begin((self.layer, self._nth), is_known and self._saved_tensors.is_repeatable)
        self._on_recomputed = None if self._repeats.is_repeating else self._note_recomputed
        return super()._saved_tensors_context(group)

    def _tensors_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        return [*self._constants, *_tensors([args, kwargs])]

    def _run_watched(self, recomputer: Recomputer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer, and learn the order of its operators."""
        before = self._orders.get(self._nth)
        with OperatorWatch(recomputer, self._tensors_before(args, kwargs)) as watch:
            result = self._inner(*args, **kwargs)
        order = self._orders[self._nth] = watch.order
        if before is not None and before.operators == order.operators:
            order.last_write |= {number: at for number, at in before.last_write.items() if at == inf}
        for tensor in (*_tensors([args, kwargs]), *tensors_in(result)):  # the model may change them
            if (number := watch.number(tensor)) is not None:
                self._probes.append((order, number, version_probe_of(tensor)))
        return result

    def _note_recomputed(self, addresses: Collection[int]) -> None:
        """Note which operators the layer's next runs under this policy have to record, and what to repeat."""
        records, self._records = self._records, None
        if records is None:
            return
        made = records.made_at(addresses)
        if self.layer not in self._wanted:
            self._wanted[self.layer] = made or None
        elif made != self._wanted[self.layer]:
            self._wanted[self.layer] = None
        else:
            self._repeats.note(self._orders[self._nth])

    def forget_decisions(self) -> None:
        """The policy changes: the next run records all operators, and repeats nothing."""
        self._wanted = {}
        self._repeats.clear()

    def _run_checkpointed(self, group: Group, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer in torch's checkpoint, which saves the inputs, and restores random state and autocast."""
        leaves, structure = _pytree.tree_flatten([list(args), kwargs])
        hidden = self._hidden(args, kwargs)
        indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _is_input(leaf, hidden)]
        inputs = [leaves[i] for i in indices]
        others = [None if i in indices else leaf for i, leaf in enumerate(leaves)]
        versions = versions_of(list(_tensors(others)))
        # The checkpoint restores the random numbers of the devices of its arguments: there is always one on this.
        on_device = torch.empty(0, device=self._saved_tensors.device)

        def run(_: torch.Tensor, *tensors: torch.Tensor) -> Any:
            check_unchanged(versions, type(self.module).__name__)
            full = list(others)
            for i, tensor in zip(indices, tensors, strict=True):
                full[i] = tensor
            again_args, again_kwargs = _pytree.tree_unflatten(full, structure)
            work = self._manager.ranges.storage("recompute", group) if in_backward() else nullcontext()
            with work:
                return self._inner(*again_args, **again_kwargs)

        contexts = lambda: (nullcontext(), self._saved_tensors.counting())  # noqa: E731
        return checkpoint(run, on_device, *inputs, use_reentrant=False, context_fn=contexts)


class PlannedLayers:
    """The boundaries around all layers of a model: ``engine.boundaries.LayerBoundaries``.

    Args:
        modules: the layers, each once.
        saved_tensors: the engine's hooks.
        policy: decides about the runs by their numbers.

    Attributes:
        boundaries: one a module.
        hidden_shape: of the hidden states of the first run; empty before it.
        is_known: the order of the runs is.
    """

    def __init__(self, modules: Sequence[nn.Module], saved_tensors: SavedTensors, policy: Policy) -> None:
        self._saved_tensors = saved_tensors
        self._policy = policy
        guard = saved_tensors.manager.guard
        options = BoundaryOptions(hooked=True, is_idle=lambda: policy.is_idle and not guard.is_on)
        positions = layer_positions([True] * len(modules), ends_in_loss=True)
        self.boundaries = [
            PlannedBoundary(number, module, saved_tensors, position, options, self._on_run)
            for number, (module, position) in enumerate(zip(modules, positions, strict=True))
        ]
        self.hidden_shape: tuple[int, ...] = ()
        self._order: list[PlannedBoundary] = list(self.boundaries)
        self._runs_of: dict[PlannedBoundary, list[LayerRun]] = {}
        self._forward: list[PlannedBoundary] = []
        self._longest: list[PlannedBoundary] = []
        self._num_runs: Counter[PlannedBoundary] = Counter()
        self._names: SiteNames | None = None
        self.is_known = self._has_begun = False
        self._depth = 0  # of the model's forwards that run now
        self._set_runs()

    @property
    def num_runs(self) -> int:
        """Runs of a forward."""
        return len(self._order)

    def begin_forward(self) -> None:
        """Begin a forward of the model.

        Raises:
            UsageError: while the first steps are measured, the forward before this one waits for its backward.
        """
        is_measuring = not self.is_known or self._saved_tensors.active_recorder is not None
        was_entered = any(boundary.is_entered for boundary in self.boundaries)
        if is_measuring and not was_entered and any(boundary.has_graph for boundary in self.boundaries):
            raise UsageError(
                "a forward begins before the backward of the last one, and memory_gib plans one forward at a time. "
                "Run backward after each forward, concatenate the batches into one, or swap layers without a budget."
            )
        for boundary in self.boundaries:
            boundary.begin_forward()
        self._num_runs.clear()
        self._forward = []
        self._has_begun = True

    def seen_order(self) -> list[nn.Module]:
        """Return the layers of the longest forward that a backward has entered, in the order of their runs."""
        return [boundary.module for boundary in self._longest if boundary.has_backward]

    def learn_order(self, window_bytes: int | None) -> tuple[list[nn.Module], list[nn.Module]]:
        """Number the runs as in ``seen_order``, which is not empty. What all other layers save is kept from now on.

        Args:
            window_bytes: as in ``apply_policy``.

        Returns:
            The layers that no backward has entered, and those that run in other forwards than the longest.
        """
        self._order = [boundary for boundary in self._longest if boundary.has_backward]
        self.is_known = True
        for boundary in self.boundaries:
            boundary.is_first_step = False
        apart = [boundary for boundary in self.boundaries if boundary not in self._order]
        for boundary in apart:
            boundary.is_apart = True
        self.apply_policy(window_bytes)
        return (
            [boundary.module for boundary in apart if not boundary.has_backward],
            [boundary.module for boundary in apart if boundary.has_backward],
        )

    def describe(self, model: nn.Module) -> Model:
        """Return what a plan file says of ``model``. What only a Megatron model has is 1."""
        batch, *middle, width = self.hidden_shape if len(self.hidden_shape) > 1 else (1, 1)
        parameter = next(model.parameters())
        return Model(
            num_layers=self.num_runs, hidden_size=max(1, width), ffn_hidden_size=1, num_attention_heads=1,
            num_query_groups=1, seq_length=max(1, prod(middle)), micro_batch_size=max(1, batch), padded_vocab_size=1,
            transformer_impl=type(model).__name__, dtype=str(parameter.dtype).removeprefix("torch."), gated=False,
        )  # fmt: skip

    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of the runs of a forward, in order, as the only chunk."""
        return (tuple(range(len(self._order))),)

    def apply_policy(self, window_bytes: int | None) -> None:
        """Apply the changed policy from the next forward on. Call this between steps."""
        self._set_runs()
        for boundary in self.boundaries:
            boundary.forget_decisions()
        self._saved_tensors.manager.apply_policy(window_bytes)

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Return a context for the forward of ``model`` that records tensors saved outside its layers.

        Raises:
            UsageError: it trains, and did not begin: its ``forward`` was called, and not the model.
        """
        if torch.is_grad_enabled() and not in_backward() and not self._has_begun:
            raise UsageError(f"{type(model).__name__}.forward is called by itself: call the model, model(...).")
        self._depth += 1
        try:
            with self._recorded(model):
                yield
        finally:
            self._depth -= 1
            self._has_begun &= self._depth > 0

    def _recorded(self, model: nn.Module) -> AbstractContextManager[Any]:
        if not self._saved_tensors.is_recorded:
            return nullcontext()
        if self._names is None:
            layers = [boundary.module for boundary in self._order]
            self._names = SiteNames(NON_LAYER, model, without=layers)
        return self._saved_tensors.outside_layers(self._names)

    def remove(self) -> None:
        """Give all layers back their own forward."""
        for boundary in self.boundaries:
            boundary.remove()
        if self._names is not None:
            self._names.remove()

    def _set_runs(self) -> None:
        positions = layer_positions([self._policy.swaps_layer(number) for number in range(len(self._order))], True)
        self._runs_of = {}
        for number, (boundary, position) in enumerate(zip(self._order, positions, strict=True)):
            run = LayerRun(number, position, self._policy.recomputes_whole(number))
            self._runs_of.setdefault(boundary, []).append(run)

    def _on_run(self, boundary: PlannedBoundary, hidden: Any) -> LayerRun:
        if not self._depth:
            raise UsageError(
                f"a layer ({type(boundary.module).__name__}) runs, but not through the forward of the model that "
                "memory_gib was given for: pass the module that your loop calls."
            )
        if not self.hidden_shape and isinstance(hidden, torch.Tensor):
            self.hidden_shape = tuple(hidden.shape)
        if not self.is_known:
            self._forward.append(boundary)
            if len(self._forward) > len(self._longest):
                self._longest = list(self._forward)
        runs = self._runs_of[boundary]
        run = runs[min(self._num_runs[boundary], len(runs) - 1)]  # more runs than known are like the last one
        self._num_runs[boundary] += 1
        return run


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, which may hold containers that are registered with PyTorch."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) in (list, tuple):  # PyTorch's own way takes ten times as long, several times a layer
        for item in value:
            yield from _tensors(item)
    elif type(value) is dict:
        yield from _tensors(list(value.values()))
    elif type(value) not in (NoneType, bool, int, float, str):
        yield from (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_input(tensor: torch.Tensor, hidden: Any) -> bool:
    """Whether a layer that is recomputed whole saves ``tensor``; masks and such stay on the device anyway."""
    return tensor.requires_grad or tensor is hidden
