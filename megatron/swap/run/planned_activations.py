"""Activation swapping within a budget for any PyTorch model: profile, search, stable, around any training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from megatron.swap.autotune.controller import AutoPlan
from megatron.swap.autotune.target import Output, PlanTarget, RunParts
from megatron.swap.autotune.training_steps import TrainingSteps, read_checks
from megatron.swap.common.plan import Infeasible
from megatron.swap.common.settings import Settings
from megatron.swap.common.spelling import ACTIVATIONS
from megatron.swap.common.types import LINEAR, OPERATOR, SwapError, UsageError
from megatron.swap.engine.build import Engine
from megatron.swap.engine.function_transforms import untransformed
from megatron.swap.engine.overrides import in_backward, override_forward
from megatron.swap.engine.policy import Policy
from megatron.swap.layers.layers import Layers
from megatron.swap.layers.learned import LearnedLayers
from megatron.swap.models.plannable import take_over
from megatron.swap.planner.table import plan_heading, plan_table
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.profiling.saved_tensor_hooks import is_traced
from megatron.swap.run.build import RealMachine, build
from megatron.swap.run.run_device import RunDevice
from megatron.swap.run.swapped_activations import SwappedActivations, SwapStats

REMEDY = "Raise the budget, or train with a smaller optimizer state or on more GPUs."


class PlannedActivations(SwappedActivations):
    """A model whose layers are kept, offloaded or recomputed as a planner decides. Made by ``activations``.

    Args:
        model: the whole model.
        layers: its layers.
        settings: the budget and more settings.
        run_device: the device of the layers.
        log: takes the planner's lines.
        autocast_cache: as in ``activations``.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[nn.Module],
        settings: Settings,
        run_device: RunDevice,
        log: Callable[[str], None],
        autocast_cache: bool = True,
    ) -> None:
        self._model = model
        self._log = log
        self._observer = run_device.observer
        self._target = PlanTarget(
            settings, lambda: self._planned.describe(model), run_device.memory_gib, (OPERATOR, LINEAR),
            remedy=REMEDY,
        )  # fmt: skip
        self._undo: list[Callable[[], None]] = []
        self._planned: LearnedLayers
        self._recorder: Recorder
        self._auto: AutoPlan | None = None
        self._steps = TrainingSteps(self._end_step)
        super().__init__(layers, self._target.policy, settings, run_device, autocast_cache)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _build(self, settings: Settings, policy: Policy, machine: RealMachine) -> Engine:
        ranges = self._run_device.ranges
        self._recorder = Recorder(machine.device, ranges, self._run_device.take_peak)
        return build(
            settings, policy, machine, ranges=ranges, observer=self._observer, recorder=self._recorder, recomputes=True,
            on_full=self._on_tier_full,
        )

    def _put_boundaries(self, policy: Policy, autocast_cache: bool) -> Layers:
        self._planned = LearnedLayers(
            self.layers, self._saved_tensors, policy, lambda: self._auto is None or self._auto.is_measuring,
            self._has_host_room, autocast_cache=autocast_cache, errors=ACTIVATIONS.errors,
        )  # fmt: skip
        return self._planned

    def _has_host_room(self, num_bytes: int) -> bool:
        return self._machine.pool.has_room(num_bytes)

    def _begin(self) -> None:
        for switched, line in take_over(self._model):
            self._undo += switched
            self._say_here([line])
        parts = RunParts(
            layers=self._planned,
            device=self._machine.device,
            host_tier=self._machine.host_tier,
            recorder=self._recorder,
            footprint=self._saved_tensors.footprint,
            pipeline_rank=0,
            num_micro_batches=lambda: self._steps.num_micro_batches,
            host_bytes=lambda: self._machine.pool.limit_bytes,
            take_peak=self._run_device.take_peak,
            guard=None if self._machine.guard.is_on else self._machine.guard,
        )
        self._undo.append(self._refuse_copies_of(self._model))
        self._undo.append(override_forward(self._model, self._observed(self._model.forward)))
        self._undo.append(self._recorder.watch(self._model))
        self._auto = AutoPlan(self._target, parts, Output(self._say, self._say_here))
        self._auto.watch(self._model)
        # Before all other hooks: the step that is over must have ended when they see the next one.
        hook = self._model.register_forward_pre_hook(self._forward_begins, prepend=True)
        self._undo += [hook.remove, self._steps.watch_optimizers([self._model])]
        self._undo.append(read_checks(self._saved_tensors.checks, [self._model]))

    def _observed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return inner(*args, **kwargs)
            with ExitStack() as stack:
                if self._observer is not None:
                    stack.enter_context(self._observer.context(self._model))
                stack.enter_context(self._planned.around(self._model))
                return inner(*args, **kwargs)

        return forward

    def _say(self, line: str) -> None:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self._say_here([line])

    def _say_here(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._log(ACTIVATIONS(line))

    def _on_tier_full(self, error: SwapError) -> None:
        if self._auto is not None:
            self._auto.tier_is_full(error)

    # --------------------------------------------------------------------- steps

    @untransformed
    def _forward_begins(self, *_: object) -> None:
        if in_backward() or is_traced():
            return
        if not torch.is_grad_enabled():
            self._steps.evaluation_begins()
            return
        self._saved_tensors.checks.before_step()  # loops without an optimizer of torch
        self._steps.forward_begins()
        self._planned.begin_forward()

    def step(self) -> None:
        """Tell that a training step has ended: after the optimizer's step, before the next forward, on every rank.

        From the first call on, steps of optimizers are not watched any more. A call without a forward since the last
        end of a step does nothing.

        Raises:
            Infeasible: no plan fits the budget.
        """
        self._saved_tensors.checks.before_step()
        self._steps.tell()

    @ACTIVATIONS.errors()
    def _end_step(self, number: int) -> None:
        if self._last is not None or self._auto is None:
            return
        was_known = self._planned.is_known
        if not was_known:
            self._learn_order(self._auto)
        self._recorder.step_ended(number + 1)
        self._say_here(self._saved_tensors.checks.take_lines())
        rescues = self._manager.guard.take_rescues()
        self._rescues += rescues
        short_bytes = max((rescue.short_bytes for rescue in rescues), default=0)
        try:
            self._auto.step_ended(
                number, short_bytes, self._machine.device.take_retries(),
                has_new_numbers=number > 1 and self._planned.is_known and not was_known,
            )  # fmt: skip
        except Infeasible as error:
            least = f"{error.smallest_gib:.10g}"
            raise Infeasible(
                f"no plan stays below {self._target.budget_gib:.10g} GiB: the smallest budget that was found feasible "
                f"is {least} GiB. Give memory_gib={least} or more, a smaller batch, or shorter sequences.",
                error.smallest_gib,
            ) from error
        if self._observer is not None:
            self._observer.end_step()

    def _learn_order(self, auto: AutoPlan) -> None:
        """Number the runs of layers, once backward has entered some, equally on all ranks.

        Raises:
            UsageError: the ranks have run other layers, or in another order, or autograd calls no hooks in any.
        """
        names = {module: name for name, module in self._model.named_modules()}
        first, *others = auto.gather(lambda: [names.get(module, "") for module in self._planned.seen_order()])
        for rank, other in enumerate(others, 1):
            for number, (one, another) in enumerate(zip_longest(first, other)):
                if one != another:
                    raise UsageError(
                        f"the ranks run different layers: run {number} of the longest forward is of {one or 'none'} on "
                        f"rank 0, and of {another or 'none'} on rank {rank}. One plan is for all ranks: let every "
                        "rank run the same layers, or swap layers without a budget."
                    )
        if not first:
            if self._planned.have_run_unhooked:
                raise UsageError(
                    "the layers run where PyTorch calls no saved-tensor hooks (inside torch.func.grad, vjp or jacrev, "
                    "or torch.autograd.graph.disable_saved_tensors_hooks), so nothing that they save can be planned. "
                    "Take gradients by backward() or torch.autograd.grad, or train without memory_gib."
                )
            return
        idle, elsewhere = self._planned.learn_order(self._target.settings.window_bytes(None))
        for layers, why in (idle, "no backward has entered"), (elsewhere, "the longest forward does not run"):
            if layers:
                known = ", ".join(names.get(layer, "") for layer in layers)
                self._say(f"{why} {known}: what these layers save is kept")

    # ------------------------------------------------------------------- figures

    def plan(self) -> str:
        """Return a table of what the planner does with each saved tensor of each layer, and why; its stage before."""
        auto = self._auto
        if auto is None or auto.plan is None:
            stage = "closed" if auto is None else auto.stage
            return f"no plan yet ({stage}): the first steps are measured, and keep as little as they can"
        return f"{plan_heading(auto.plan)}\n\n{plan_table(auto.plan)}"

    def _figures(self) -> SwapStats:
        auto = self._auto
        last, plan = (None, None) if auto is None else (auto.last_step, auto.plan)
        predicted = None if plan is None else plan.predicted
        return replace(
            super()._figures(),
            num_steps=self._steps.number,
            stage=None if auto is None else auto.stage,
            budget_gib=self._target.budget_gib,
            predicted_gib=None if predicted is None else predicted.peak_gib,
            predicted_ms=None if predicted is None else predicted.step_ms,
            peak_gib=None if last is None else last.peak_gib,
            step_ms=None if last is None else last.ms,
        )

    def close(self) -> None:
        """Restore the model and release host memory. A second call does nothing.

        Call it after the last backward, on every rank. Files that were asked for are written when a plan is chosen.
        """
        if self._last is not None:
            return
        with ExitStack() as whatever_fails:
            whatever_fails.callback(super().close)
            whatever_fails.callback(self._saved_tensors.checks.read)
            if self._auto is not None:
                if self._steps.number:
                    whatever_fails.callback(self._auto.finish)
                whatever_fails.callback(self._auto.close)
            whatever_fails.callback(self._recorder.abandon)
            for undo in self._undo:
                whatever_fails.callback(undo)
