"""The boundary around one layer of a model that a planner handles."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.site_paths import CHECKPOINT_PATH
from megatron.swap.common.types import LayerPosition, Site, UsageError
from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.function_transforms import in_transform
from megatron.swap.engine.handle import Alias, Group
from megatron.swap.engine.layer_hooks import BoundaryOptions, in_backward
from megatron.swap.engine.producer_records import version_probe_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.recomputed_run import seeing_saved
from megatron.swap.engine.run_snapshot import RunSnapshot
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.native.operator_following import load_operators
from megatron.swap.nn.alike_runs import AlikeRuns, form_of, kind_of
from megatron.swap.nn.module_boundary import ModuleBoundary, in_checkpoint
from megatron.swap.nn.module_weights import computing_devices
from megatron.swap.operators.kinds import has_atomics, tensors_in
from megatron.swap.operators.records import OperatorFollower, OperatorOrder, OperatorRecords, OperatorWatch
from megatron.swap.operators.repeats import RepeatedRuns
from megatron.swap.profiling.saved_tensor_hooks import users_hooks

MOST_UNSEEN = 3
"""Runs in a row of which C++ has not seen all operators, behind which a layer is followed no more: it takes a gradient,
enters a dispatch mode, or has operators in other threads. One run may do so while ``torch.compile`` compiles."""


@dataclass(frozen=True)
class LayerRun:
    """One run of a layer in a forward.

    Attributes:
        is_whole: it is recomputed whole in backward.
    """

    number: int
    position: LayerPosition
    is_whole: bool


class PlannedBoundary(ModuleBoundary):
    """The boundary of a layer whose next run says what is done.

    Args:
        number: of the layer before the order of the runs is known.
        on_run: called with the hidden states when a forward runs the layer; returns the run.
        alike: says which runs are not measured.

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
        alike: AlikeRuns,
    ) -> None:
        self._on_run = on_run
        self._alike = alike
        self._kind: Hashable = None  # of the present run, while steps are measured
        self._like: tuple[int, ...] = ()  # runs that are measured in place of the present one
        self.has_backward = self.is_entered = self.is_apart = False
        self._runs_once = False  # the present run: it would save something else in backward
        self._graph: weakref.ref[Any] | None = None
        self.is_first_step = True
        self._nth = -1  # of the layer's runs in this forward
        self._orders: dict[int, OperatorOrder] = {}  # of the n-th run
        self._saved: dict[int, tuple[Hashable, ...]] = {}  # forms of the tensors that the n-th run saves
        self._probes: list[tuple[OperatorOrder, int, Alias]] = []  # of storages, by their numbers
        # Outputs to record, by run, under the present policy; None: all. Before a run has shown it there is no entry.
        self._wanted: dict[int, frozenset[int] | None] = {}
        self._repeats = RepeatedRuns()
        # C++ is built once for a machine, and now: a step that waits for the compiler would be judged slow. Offloaded
        # weights are elsewhere in backward.
        self._has_operators = load_operators() is not None and not computing_devices(module)
        self._num_unseen = 0  # runs in a row
        self._records: OperatorRecords | None = None  # of the present run
        super().__init__(number, module, saved_tensors, position, options)
        self._make_packer = self._repeats.packer

    def _run_bounded(self, *args: Any, **kwargs: Any) -> Any:
        if in_checkpoint() or (in_backward() and torch.is_grad_enabled()):
            raise UsageError(
                f"{type(self.module).__name__} runs inside an activation checkpoint of the model, and memory_gib plans "
                "what is recomputed. Switch the model's checkpointing off."
            )
        if self.is_apart:
            return self._inner(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse_caches(args, kwargs)
            self._nth += 1
            run = self._on_run(self, self._hidden(args, kwargs))
            self.layer = run.number
            if self._names is not None:
                self._names.layer = run.number
            self._kind, self._like = None, ()
            self._runs_once = in_transform() or users_hooks() is not None
            if not run.is_whole and not self._runs_once and self._alike.is_measuring():
                order = self._orders.get(self._nth)
                # A layer that is not followed is told from others by what it saves.
                did = self._saved.get(self._nth) if order is None else zip(order.operators, order.shapes, strict=True)
                self._kind = kind_of(self.module, _tensors([args, kwargs]), did, self._has_operators)
                self._like = self._alike.find(self._kind)
            is_again = (run.is_whole and not self._runs_once) or self._like
            self.set_position(run.position, checkpoint if is_again else None)
            self._note_sources(run, args, kwargs)
        try:
            return super()._run_bounded(*args, **kwargs)
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
        if self._kind is None and self._saved_tensors.active_recorder is None:
            if self._checkpoint is not None:
                return self._run_checkpointed(group, args, kwargs)
            return self._run_recorded(args, kwargs)
        if self._runs_once:
            result = self._run_recorded(args, kwargs)
            self._saved_tensors.not_repeatable(group)
            return result
        before = RunSnapshot(self._reader, args, kwargs)
        if self._checkpoint is not None:
            result = self._run_checkpointed(group, args, kwargs)
        else:
            result = self._run_recorded(args, kwargs)
        is_repeatable = self._note_snapshot(before, group)
        if self._like:
            if not is_repeatable:
                self._refuse_measuring()
            self._saved_tensors.is_like(group, self._like)
        if self._kind is not None and not self._like:
            if not is_repeatable or not self._inputs_in(args, kwargs):
                self._alike.refuse(self._kind)
            given = filter(is_plain, _tensors([args, kwargs]))
            self._alike.note(self._kind, self.layer, group.num_bytes, given)
        return result

    def _refuse_measuring(self) -> NoReturn:
        self._alike.refuse(self._kind)
        raise UsageError(
            f"{type(self.module).__name__} is like other layers and yet changes its inputs, its buffers, its "
            "attributes or the random state of Python or NumPy, so it must not run again; and the host has no room for "
            "what it saves. Raise host_gib, or swap layers without a budget."
        )

    def _run_recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer. If some of what it saves may be recomputed, watch its operators, or record them."""
        recomputer = self._saved_tensors.recomputer
        if recomputer is None or not recomputer.is_recording or not self._has_operators:
            return self._run_unwatched(*args, **kwargs)
        order = self._orders.get(self._nth)
        if order is None or self.is_first_step:
            return self._run_watched(recomputer, *args, **kwargs)
        assert self._sources is not None  # noted as the layer was called
        follower: OperatorFollower
        if self._repeats.is_repeating:
            follower = self._repeats.recording(recomputer, self._sources, order)
        else:
            tensors, wanted = self._tensors_before(args, kwargs), self._wanted.get(self.layer)
            follower = self._records = OperatorRecords(recomputer, self.layer, self._sources, order, tensors, wanted)
        with follower:
            result = self._inner(*args, **kwargs)
        self._repeats.end(follower.is_as_watched)
        if not follower.is_as_watched:  # the next run is watched
            self._records = None
            self._forget_order(recomputer)
        return result

    def _forget_order(self, recomputer: Recomputer) -> None:
        del self._orders[self._nth]
        self._wanted.pop(self.layer, None)
        recomputer.forget_trials(self.layer)

    def _saved_tensors_context(self, group: Group) -> AbstractContextManager[Any]:
        order, recomputer = self._orders.get(self._nth), self._saved_tensors.recomputer
        if order is not None and recomputer is not None and order.num_modes != _len_torch_dispatch_stack():
            self._repeats.forget((self.layer, self._nth))
            self._forget_order(recomputer)
        is_known = self._nth in self._orders and self._wanted.get(self.layer) is not None and not self.is_first_step
        is_known &= self._saved_tensors.is_repeatable and not self._runs_once
        self._repeats.begin((self.layer, self._nth), is_known)
        self._on_recomputed = None if self._repeats.is_repeating else self._note_recomputed
        return super()._saved_tensors_context(group)

    def _tensors_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        return [*self._constants, *_tensors([args, kwargs])]

    def _needs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, ...]:
        return tuple([tensor.requires_grad for tensor in self._tensors_before(args, kwargs)])

    def _run_unwatched(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._kind is None else self._noting_saved():
            return self._inner(*args, **kwargs)

    @contextmanager
    def _noting_saved(self) -> Iterator[None]:
        saved: list[Hashable] = []
        with seeing_saved(lambda tensor: saved.append((form_of(tensor), _held_bytes(tensor)))):
            yield
        self._saved[self._nth] = tuple(saved)

    def _run_watched(self, recomputer: Recomputer, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and learn the order of its operators."""
        before = self._orders.get(self._nth)
        watching = OperatorWatch(recomputer, self._tensors_before(args, kwargs))
        with watching as watch, seeing_saved(watch.saves), self._noting_saved():
            result = self._inner(*args, **kwargs)
        if not watch.saw_all:
            self._num_unseen += 1
            self._has_operators = self._num_unseen < MOST_UNSEEN
            self._orders.pop(self._nth, None)
            return result
        self._num_unseen = 0
        order = self._orders[self._nth] = watch.end()
        order.needs = self._needs(args, kwargs)
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
        # Else the first run under a plan would have to watch, and to keep what single operators have made.
        must_watch = self._like and self._has_operators and self._nth not in self._orders
        watcher = self._saved_tensors.recomputer if must_watch else None
        inner = self._run_unwatched if watcher is None else partial(self._run_watched, watcher)
        # The checkpoint restores the random numbers of the devices of its arguments: there is always one on this.
        device = self._saved_tensors.device
        on_device = torch.empty(0, device=device)
        order, name = self._orders.get(self._nth), f"layer {self.layer} ({type(self.module).__name__})"
        places = None if order is None or order.needs != self._needs(args, kwargs) else order.compared
        checked = self._saved_tensors.checked_run(
            (self.module, self._nth), name, self._reader.read(one for one in others if one is not None),
            saved=places and places.last, in_turn=places and places.all,
            num_saved=places and places.num_saved, sees_saved=True,
            # Where the operators are not known, two runs tell whether kernels are deterministic: never a guess.
            is_exact=device.type != "cuda" or order is None or not has_atomics(order.operators),
            forked=_forked_random_states(device),
        )  # fmt: skip

        def run(_: torch.Tensor, *tensors: torch.Tensor) -> Any:
            full = list(others)
            for i, tensor in zip(indices, tensors, strict=True):
                full[i] = tensor
            again_args, again_kwargs = _pytree.tree_unflatten(full, structure)
            work = self._manager.ranges.storage("recompute", group) if in_backward() else nullcontext()
            with work:
                return checked(self._inner if in_backward() else inner, *again_args, **again_kwargs)

        contexts = lambda: (nullcontext(), self._saved_tensors.counting())  # noqa: E731
        return checkpoint(run, on_device, *inputs, use_reentrant=False, context_fn=contexts)


def _held_bytes(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage().nbytes() if is_plain(tensor) else None


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


def _forked_random_states(device: torch.device) -> Callable[[], AbstractContextManager[None]] | None:
    """Return what makes a context behind which random states are as before it; ``None``: a dry run has none."""
    if device.type == "meta":
        return None
    return partial(torch.random.fork_rng, [] if device.type == "cpu" else [device], device_type=device.type)


def _is_input(tensor: torch.Tensor, hidden: Any) -> bool:
    """Whether a layer that is recomputed whole saves ``tensor``; masks and such stay on the device anyway."""
    return tensor.requires_grad or tensor is hidden
