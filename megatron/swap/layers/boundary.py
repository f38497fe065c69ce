"""The boundary around a layer: replaces its ``forward``, and is called before backward enters the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any, NoReturn, Protocol

import torch

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.site_paths import CHECKPOINT_PATH
from megatron.swap.common.types import Site, UsageError
from megatron.swap.devices.plain_tensors import addresses_of, is_plain
from megatron.swap.engine.function_transforms import in_transform
from megatron.swap.engine.handle import Group
from megatron.swap.engine.layer_state import StateReader
from megatron.swap.engine.overrides import BoundsLayer, in_backward, override_forward
from megatron.swap.engine.run_snapshot import RunSnapshot
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.engine.sites import SiteNames
from megatron.swap.layers.makers import Makers
from megatron.swap.layers.mark import mark
from megatron.swap.layers.measure import AlikeRuns, kind_of
from megatron.swap.layers.run import LayerRun, LayerSpec
from megatron.swap.layers.whole import run_in_frameworks, run_in_torchs, torch_checkpoint
from megatron.swap.profiling.saved_tensor_hooks import are_hooks_off, innermost_hooks, is_of_checkpoint, users_hooks


class Runs(Protocol):
    """The object that decides about the runs of a layer: ``Layers``, which describes these methods."""

    errors: Callable[[], AbstractContextManager[None]]

    def begin(self, boundary: Boundary, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerRun | None: ...
    def is_in_layer(self) -> bool: ...
    def is_idle(self) -> bool: ...
    def in_checkpoint(self, boundary: Boundary) -> None: ...
    def unhooked(self) -> None: ...
    def on_backward(self, boundary: Boundary) -> Callable[[], None]: ...


class Boundary(BoundsLayer):
    """Replaces the ``forward`` of one layer by a function that handles the layer's saved tensors.

    ``hooked`` is False for a layer that keeps everything: its boundary counts what is kept, and marks the result.
    ``makes_operators``: the policy may recompute single operators, which are followed if they ``may_follow``; otherwise
    the framework's kernels record their outputs. ``alike`` tells which runs are not measured; by default all are.
    """

    def __init__(
        self, spec: LayerSpec, saved_tensors: SavedTensors, runs: Runs, *, hooked: bool = True,
        makes_operators: bool = False, may_follow: bool = True, alike: AlikeRuns | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.module = spec.module
        self._runs = runs
        self._saved_tensors = saved_tensors
        self._alike = alike
        # Listed in each forward: FSDP2 exchanges parameters, and Megatron moves them after the model is built.
        self._tables = [table for one in spec.module.modules() for table in (one._parameters, one._buffers)]
        self._weight_shapes = frozenset(one.shape for one in spec.module.parameters() if one.dim() > 1)
        self._reader = StateReader(spec.module, spec.attributes)
        self.is_running = False
        self._own_forward = spec.module.forward
        self.makers = None
        if makes_operators:
            self.makers = Makers(saved_tensors, self.call, self.constants, is_possible=may_follow)
        self._undo = [override_forward(spec.module, self._forward)]  # before all that it would leave if it were refused
        self._undo.append(self._refuse_copies_of(spec.module))
        self._names = SiteNames(spec.number, spec.module) if hooked else None

    def remove(self) -> None:
        """Restore the layer's own forward."""
        if self._names is not None:
            self._names.remove()
        for undo in self._undo:
            undo()

    def constants(self) -> list[torch.Tensor]:
        """Return the layer's parameters and buffers, which are never offloaded."""
        found = {id(one): one for table in self._tables for one in table.values() if one is not None}
        return list(found.values())

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward."""
        self.is_running = True
        try:
            if self.spec.autocast_cache:
                return self._own_forward(*args, **kwargs)
            with _uncached():
                return self._own_forward(*args, **kwargs)
        finally:
            self.is_running = False

    # ------------------------------------------------------------------------ a forward

    @torch.compiler.disable
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # `torch.compile` leaves the layer uncompiled. A layer that calls itself is one layer: inner calls have no
        # boundary. Nor have other layers that it calls, where runs are planned one after another.
        if self.is_running or self._runs.is_in_layer():
            return self._own_forward(*args, **kwargs)
        if are_hooks_off():
            if torch.is_grad_enabled():
                self._runs.unhooked()
            return self._own_forward(*args, **kwargs)
        with self._runs.errors():
            return self._bounded(args, kwargs)

    def _bounded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        manager, saved_tensors = self._saved_tensors.manager, self._saved_tensors
        again = in_backward()
        if self.spec.rerun is None:
            is_inside = in_checkpoint()
            if is_inside or (again and torch.is_grad_enabled()):
                self._runs.in_checkpoint(self)
            if is_inside:  # the boundary's hooks would hide the layer from the checkpoint, which would save all
                return self.call(*args, **kwargs)
            # Count the finished waits here: without calls of ``stats`` their events would pile up.
            manager.counters.wait_ms()
        if again:
            # A recomputation: its graph is freed at once. Outer hooks must see the same as in forward, where the
            # boundary's hooks hide the layer from them. The observer does not count recomputations.
            with saved_tensors.untouched(observed=False):
                return self.call(*args, **kwargs)
        if not torch.is_grad_enabled():
            manager.collect_if_empty()  # an evaluation behind a graph that was dropped
            if self.spec.on_run_without_grad is None:
                return self.call(*args, **kwargs)
            self.spec.on_run_without_grad(self.spec.number)
            # Megatron computes bias, dropout and residual with gradients even here; what they save is freed at once.
            with manager.ranges.forward(self.spec.number), saved_tensors.untouched():
                return self.call(*args, **kwargs)
        run = self._runs.begin(self, args, kwargs)
        if run is None:
            return self.call(*args, **kwargs)
        try:
            self._prepare(run)
            return self._run(run)
        finally:
            if self.makers is not None:
                self.makers.end()

    def _prepare(self, run: LayerRun) -> None:
        """Decide how ``run`` is done, in addition to the policy."""
        if self.makers is None:
            return
        self._refuse_caches(run)
        if self._names is not None:
            self._names.layer = run.number
        run.runs_once = in_transform() or users_hooks() is not None
        if self._alike is not None and run.checkpoint is None and not run.runs_once and self._alike.is_measuring():
            run.kind = kind_of(self.module, run.tensors(), self.makers.did(run), self.makers.is_following)
            run.like = self._alike.find(run.kind)
        if run.runs_once:
            run.checkpoint = None
        elif run.like:
            run.checkpoint = torch_checkpoint
        self.makers.note_sources(run)

    def _run(self, run: LayerRun) -> Any:
        saved_tensors, manager = self._saved_tensors, self._saved_tensors.manager
        footprint, ranges, hidden = saved_tensors.footprint, manager.ranges, run.hidden
        is_tensor = isinstance(hidden, torch.Tensor)  # a sparse one has no ``nbytes``
        footprint.begin_layer(run.number, hidden.numel() * hidden.element_size() if is_tensor else 0)
        if self._runs.is_idle() and not ranges.is_on:  # asked now: a larger input may just have changed that
            result = self.call(*run.args, **run.kwargs)
            footprint.end_layer(run.number, is_unseen=True)
            return result
        with ranges.forward(run.number):
            run.group = manager.begin_forward(run.number, run.position)
            if ranges.is_on:
                _mark_end_of_backward(ranges, run.group, hidden)
                if (recorder := saved_tensors.active_recorder) is not None and self.makers is None:
                    recorder.called_with(run.group.label, hidden)
                elif recorder is not None:
                    recorder.inputs(run.group.label, run.inputs())
            with self._hooks(run):
                result = self._body(run)
            footprint.end_layer(run.number, is_unseen=run.checkpoint is not None)
            manager.end_forward(run.group)
        return self._marked(result, run)

    def _hooks(self, run: LayerRun) -> AbstractContextManager[Any]:
        """Return the context in which the tensors that ``run`` saves are kept, offloaded or recomputed."""
        # The hooks outlive the run. They must not hold it, since it holds the layer's input.
        group, number, names, makers = run.group, run.number, self._names, self.makers
        on_recomputed = None if makers is None else makers.begin(run)
        constants, shapes = addresses_of(self.constants()), self._weight_shapes
        if run.checkpoint is not None:
            ordinals = count()
            where = lambda: (group, Site(number, CHECKPOINT_PATH, next(ordinals)))  # noqa: E731
            return self._saved_tensors.hooks(where, constants, shapes)
        if names is None:
            return self._saved_tensors.keeping(group, constants, shapes)
        names.begin()
        stack = ExitStack()
        stack.enter_context(self._saved_tensors.recording(number, on_recomputed))
        packer = None if makers is None else makers.packer
        here = lambda: (group, names.next_site())  # noqa: E731
        stack.enter_context(self._saved_tensors.hooks(here, constants, shapes, run.sources, packer))
        return stack

    def _body(self, run: LayerRun) -> Any:
        """Run the layer in its hooks. While steps are recorded, note whether the layer may run again."""
        saved_tensors = self._saved_tensors
        if run.kind is None and saved_tensors.active_recorder is None:
            return self._run_once_or_whole(run)
        if run.runs_once:
            result = self._run_once_or_whole(run)
            saved_tensors.not_repeatable(run.group)
            return result
        snapshot = RunSnapshot(self._reader, run.args, run.kwargs)
        result = self._run_once_or_whole(run)
        is_repeatable = snapshot.is_unchanged() and not saved_tensors.must_run_once
        if is_repeatable:
            run.before = snapshot.state
        else:  # such as batch norm, which counts what it has seen
            saved_tensors.not_repeatable(run.group)
        self._note_kind(run, is_repeatable=is_repeatable)
        return result

    def _run_once_or_whole(self, run: LayerRun) -> Any:
        if run.checkpoint is None:
            return self.call(*run.args, **run.kwargs) if self.makers is None else self.makers.run(run)
        parts = self.module, run, self.call, self._saved_tensors, self._reader
        if self.spec.rerun is not None:
            return run_in_frameworks(*parts, self.spec.rerun)
        assert self.makers is not None
        return run_in_torchs(*parts, self.makers)

    def _note_kind(self, run: LayerRun, *, is_repeatable: bool) -> None:
        """Note ``run`` for runs that are alike, which are not measured."""
        if self._alike is None or run.kind is None:
            return
        if run.like:
            if not is_repeatable:
                self._refuse_measuring(run)
            self._saved_tensors.footprint.is_like(run.like[-1])
            if (recorder := self._saved_tensors.active_recorder) is not None:
                recorder.is_like(run.group.label, run.like)
            return
        if not is_repeatable or not run.inputs():
            self._alike.refuse(run.kind)
        self._alike.note(run.kind, run.number, run.group.num_bytes, filter(is_plain, run.tensors()))

    def _marked(self, result: Any, run: LayerRun) -> Any:
        """Return the layer's result with a mark, which backward reaches before it enters the layer."""
        saved_tensors, manager, group, before = self._saved_tensors, self._saved_tensors.manager, run.group, run.before
        makers, entered = self.makers, self._runs.on_backward(self)
        probes = [] if makers is None else makers.take_probes()

        def on_backward() -> None:
            entered()
            if probes:
                Makers.check(probes)
            if before is not None and not before.can_be_put_back():
                saved_tensors.not_repeatable(group)
            manager.begin_backward(group)

        return mark(result, on_backward, is_alone=self.spec.rerun is not None)

    # ------------------------------------------------------------------------ refusals

    def _refuse_caches(self, run: LayerRun) -> None:
        for value in (*run.args, *run.kwargs.values()):
            if type(value).__name__.endswith("Cache"):
                raise UsageError(
                    f"{type(self.module).__name__} is called with a {type(value).__name__}, which a layer that runs "
                    "again would fill twice. Call the model with use_cache=False, or without past_key_values."
                )

    def _refuse_measuring(self, run: LayerRun) -> NoReturn:
        assert self._alike is not None
        self._alike.refuse(run.kind)
        raise UsageError(
            f"{type(self.module).__name__} is like other layers and yet changes its inputs, its buffers, its "
            "attributes or the random state of Python or NumPy, so it must not run again; and the host has no room for "
            "what it saves. Raise host_gib, or swap layers without a budget."
        )


def _mark_end_of_backward(ranges: Ranges, group: Group, hidden: Any) -> None:
    """End the layer's backward range once the gradient of its input, the hidden states, is computed."""
    if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
        hidden.register_hook(lambda grad: ranges.backward_over(group))


@contextmanager
def _uncached() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def in_checkpoint() -> bool:
    """Whether this forward runs inside a ``torch.utils.checkpoint`` with ``use_reentrant=False``."""
    hooks = innermost_hooks()
    return hooks is not None and is_of_checkpoint(hooks)
