"""Boundaries around the layers of a model that runs them in its own order. Runs, not modules, have numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import nn

from megatron.swap.common.plan import Model
from megatron.swap.common.types import UsageError
from megatron.swap.engine.overrides import in_backward
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.layers.boundary import Boundary
from megatron.swap.layers.layers import Layers
from megatron.swap.layers.measure import AlikeRuns
from megatron.swap.layers.order import RunOrder
from megatron.swap.layers.run import LayerRun, LayerSpec
from megatron.swap.params.module_weights import computing_devices


class LearnedLayers(Layers):
    """The boundaries around ``modules``, each once. The first step shows their order. See ``AlikeRuns``, too."""

    def __init__(
        self, modules: Sequence[nn.Module], saved_tensors: SavedTensors, policy: Policy,
        is_measuring: Callable[[], bool] = lambda: False, has_room: Callable[[int], bool] = lambda _: True, *,
        autocast_cache: bool = True, errors: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        super().__init__(saved_tensors, policy, errors)
        self._alike = AlikeRuns(is_measuring, has_room)
        self._has_begun = False
        self._depth = 0  # of the model's forwards that run now
        self.order = RunOrder()  # of the runs
        self.install([
            LayerSpec(module=module, number=number, autocast_cache=autocast_cache)
            for number, module in enumerate(modules)
        ])  # fmt: skip

    def _boundary(self, spec: LayerSpec, hooked: bool) -> Boundary:
        # Offloaded weights are elsewhere in backward, so operators on them cannot run again.
        may_follow = not computing_devices(spec.module)
        boundary = Boundary(
            spec, self._saved_tensors, self, makes_operators=True, may_follow=may_follow, alike=self._alike
        )
        self.order.add(boundary)
        return boundary

    @property
    def is_known(self) -> bool:
        """Whether the order of the runs is known."""
        return self.order.is_known

    @property
    def num_runs(self) -> int:
        """Runs of a forward."""
        return len(self.order.boundaries)

    # ------------------------------------------------------------------- asked by boundaries

    def begin(self, boundary: Boundary, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerRun | None:
        if boundary in self.order.apart:
            return None
        if not self._depth:
            raise UsageError(
                f"a layer ({type(boundary.module).__name__}) runs, but not through the forward of the model that "
                "memory_gib was given for: pass the module that your loop calls."
            )
        nth, runs = self.order.runs(boundary), self._runs[boundary]
        planned = runs[min(nth, len(runs) - 1)]  # more runs than known are like the last one
        run = LayerRun(planned.number, planned.position, args, kwargs, nth, planned.checkpoint)
        self.order.note_shape(run)
        return run

    def is_in_layer(self) -> bool:
        return any(one.is_running for one in self.boundaries)

    def is_idle(self) -> bool:
        return self.order.is_known and super().is_idle()

    def in_checkpoint(self, boundary: Boundary) -> None:
        raise UsageError(
            f"{type(boundary.module).__name__} runs inside an activation checkpoint of the model, and memory_gib plans "
            "what is recomputed. Switch the model's checkpointing off."
        )

    def on_backward(self, boundary: Boundary) -> Callable[[], None]:
        return self.order.on_backward(boundary)

    # ------------------------------------------------------------------- the model's forward

    def begin_forward(self) -> None:
        self.order.begin_forward(is_measuring=self._saved_tensors.active_recorder is not None)
        self._alike.begin_forward()
        self._has_begun = True

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        if torch.is_grad_enabled() and not in_backward() and not self._has_begun:
            raise UsageError(f"{type(model).__name__}.forward is called by itself: call the model, model(...).")
        self._depth += 1
        try:
            with super().around(model):
                yield
        finally:
            self._depth -= 1
            self._has_begun &= self._depth > 0

    # ------------------------------------------------------------------- asked by a run

    def seen_order(self) -> list[nn.Module]:
        """Return the layers of the longest forward that a backward has entered, in the order of their runs."""
        return [boundary.module for boundary in self.order.seen()]

    def learn_order(self, window_bytes: int | None) -> tuple[list[nn.Module], list[nn.Module]]:
        """Number the runs by ``RunOrder.learn``, and apply the policy to them. Return its results, as modules."""
        idle, elsewhere = self.order.learn()
        for boundary in self.boundaries:
            assert boundary.makers is not None
            boundary.makers.is_first_step = False
        self.apply_policy(window_bytes)
        return [boundary.module for boundary in idle], [boundary.module for boundary in elsewhere]

    def describe(self, model: nn.Module) -> Model:
        """Return the description of ``model`` for a plan file. Sizes that only a Megatron model has are 1."""
        shape = self.order.hidden_shape
        batch, *middle, width = shape if len(shape) > 1 else (1, 1)
        parameter = next(model.parameters())
        return Model(
            num_layers=self.num_runs, hidden_size=max(1, width), ffn_hidden_size=1, num_attention_heads=1,
            num_query_groups=1, seq_length=max(1, prod(middle)), micro_batch_size=max(1, batch), padded_vocab_size=1,
            transformer_impl=type(model).__name__, dtype=str(parameter.dtype).removeprefix("torch."), gated=False,
        )  # fmt: skip

    def chunks(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.num_runs)) if self.is_known else (),)

    def apply_policy(self, window_bytes: int | None) -> None:
        for boundary in self.boundaries:
            assert boundary.makers is not None
            boundary.makers.forget_decisions()
        super().apply_policy(window_bytes)

    def _plan_runs(self) -> None:
        self._runs.clear()
        self._plan_chunk([(boundary, number) for number, boundary in enumerate(self.order.boundaries)], True)

    def _bounded(self) -> Sequence[Boundary]:
        return self.order.boundaries
