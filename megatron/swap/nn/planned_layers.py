"""Boundaries around the layers of a model that a planner handles. Runs, not modules, have numbers.

A layer may run several times in a forward, and a model may run its layers in another order than it lists them. So the
first step, which is not recorded, shows which layer runs when. From the second step on the runs of a forward are
numbered in their order, and each has an action of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import nn

from megatron.swap.common.plan import Model
from megatron.swap.common.site_paths import NON_LAYER
from megatron.swap.common.types import UsageError, layer_positions
from megatron.swap.engine.layer_hooks import BoundaryOptions, in_backward
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.engine.sites import SiteNames
from megatron.swap.nn.alike_runs import AlikeRuns
from megatron.swap.nn.planned_boundary import LayerRun, PlannedBoundary


class PlannedLayers:
    """The boundaries around all layers of a model: ``engine.boundaries.LayerBoundaries``.

    Args:
        modules: the layers, each once.
        saved_tensors: the engine's hooks.
        policy: decides about the runs by their numbers.
        is_measuring: whether steps are measured now.
        has_room: whether the host has room for this many bytes more.

    Attributes:
        boundaries: one a module.
        hidden_shape: of the hidden states of the first run; empty before it.
        is_known: the order of the runs is.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        saved_tensors: SavedTensors,
        policy: Policy,
        is_measuring: Callable[[], bool] = lambda: False,
        has_room: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._saved_tensors = saved_tensors
        self._policy = policy
        self._alike = AlikeRuns(is_measuring, has_room)
        self.is_known = self._has_begun = False
        guard = saved_tensors.manager.guard
        is_idle = lambda: policy.is_idle and not guard.is_on and self.is_known  # noqa: E731
        options = BoundaryOptions(hooked=True, is_idle=is_idle)
        positions = layer_positions([True] * len(modules), ends_in_loss=True)
        self.boundaries = [
            PlannedBoundary(number, module, saved_tensors, position, options, self._on_run, self._alike)
            for number, (module, position) in enumerate(zip(modules, positions, strict=True))
        ]
        self.hidden_shape: tuple[int, ...] = ()
        self._order: list[PlannedBoundary] = list(self.boundaries)
        self._runs_of: dict[PlannedBoundary, list[LayerRun]] = {}
        self._forward: list[PlannedBoundary] = []
        self._longest: list[PlannedBoundary] = []
        self._num_runs: Counter[PlannedBoundary] = Counter()
        self._names: SiteNames | None = None
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
                "Run backward after each forward, concatenate the batches into one, or swap layers without a budget. "
                "Where a step is skipped, delete its loss (del loss)."
            )
        for boundary in self.boundaries:
            boundary.begin_forward()
        self._num_runs.clear()
        self._alike.begin_forward()
        self._forward = []
        self._has_begun = True

    @property
    def have_run_unhooked(self) -> bool:
        """Whether layers have run where autograd calls no hooks."""
        return any(boundary.has_run_unhooked for boundary in self.boundaries)

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
        """Return the numbers of the runs of a forward, in order, as the only chunk; none before they are known."""
        return (tuple(range(len(self._order))) if self.is_known else (),)

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
        if not self.hidden_shape and isinstance(hidden, torch.Tensor) and not hidden.is_nested:
            self.hidden_shape = tuple(hidden.shape)
        if not self.is_known:
            self._forward.append(boundary)
            if len(self._forward) > len(self._longest):
                self._longest = list(self._forward)
        runs = self._runs_of[boundary]
        run = runs[min(self._num_runs[boundary], len(runs) - 1)]  # more runs than known are like the last one
        self._num_runs[boundary] += 1
        return run
