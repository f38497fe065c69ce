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
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.plan import Infeasible
from megatron.swap.common.settings import Settings
from megatron.swap.common.spelling import ACTIVATIONS
from megatron.swap.common.types import GIB, LINEAR, OPERATOR, SwapError, UsageError
from megatron.swap.devices.base import Device
from megatron.swap.engine.function_transforms import untransformed
from megatron.swap.engine.layer_hooks import in_backward, override_forward
from megatron.swap.engine.settings import Instruments
from megatron.swap.memory.host_memory import machine_memory_gib
from megatron.swap.nn.found_layers import is_compiled
from megatron.swap.nn.layer_devices import devices_of
from megatron.swap.nn.module_boundary import ModuleBoundary
from megatron.swap.nn.planned_layers import PlannedLayers
from megatron.swap.nn.swapped_activations import SwappedActivations, SwapStats
from megatron.swap.planner.table import plan_heading, plan_table
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.profiling.saved_tensor_hooks import is_traced

REMEDY = "Raise the budget, or train with a smaller optimizer state or on more GPUs."


class PlannedActivations(SwappedActivations):
    """A model whose layers are kept, offloaded or recomputed as a planner decides. Made by ``activations``.

    Args:
        model: the whole model.
        layers: its layers.
        settings: the budget and more settings.
        device: of the layers.
        log: takes the planner's lines.
        autocast_cache: as in ``activations``.
    """

    _recomputes = True

    def __init__(
        self,
        model: nn.Module,
        layers: list[nn.Module],
        settings: Settings,
        device: torch.device,
        log: Callable[[str], None],
        autocast_cache: bool = True,
    ) -> None:
        self._model = model
        self._log = log
        self._ranges = Ranges()
        self._observer = None if device.type == "cuda" else Observer()
        self._target = PlanTarget(
            settings, lambda: self._planned.describe(model), _memory_gib(device), (OPERATOR, LINEAR),
            remedy=REMEDY,
        )  # fmt: skip
        self._undo: list[Callable[[], None]] = []
        self._planned: PlannedLayers
        self._recorder: Recorder
        self._auto: AutoPlan | None = None
        self._steps = TrainingSteps(self._end_step)
        super().__init__(layers, self._target.policy, settings, device, self._instruments, autocast_cache)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _instruments(self, device: Device) -> Instruments:
        self._recorder = Recorder(device, self._ranges, self._take_peak)
        return Instruments(
            ranges=self._ranges, observer=self._observer, recorder=self._recorder, on_full=self._on_tier_full
        )

    def _put_boundaries(self, is_swapped: list[bool]) -> Sequence[ModuleBoundary]:
        self._planned = PlannedLayers(
            self.layers, self._saved_tensors, self._target.policy,
            lambda: self._auto is None or self._auto.is_measuring, self._has_host_room,
        )  # fmt: skip
        return self._planned.boundaries

    def _has_host_room(self, num_bytes: int) -> bool:
        return self._tier.pool.has_room(num_bytes)

    def _begin(self) -> None:
        for switched, line in take_over(self._model):
            self._undo += switched
            self._say_here([line])
        parts = RunParts(
            boundaries=self._planned,
            device=self._device,
            host_tier=self._tier,
            recorder=self._recorder,
            footprint=self._saved_tensors.footprint,
            pipeline_rank=0,
            num_micro_batches=lambda: self._steps.num_micro_batches,
            host_bytes=lambda: self._tier.pool.limit_bytes,
            take_peak=self._take_peak,
            guard=None if self._guard.is_on else self._guard,
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

    def _take_peak(self) -> tuple[int, int]:
        peak = self._device.take_peak()
        if peak is None and self._observer is not None:
            peak = self._observer.take_peak()
        return peak or (0, 0)

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
                number, short_bytes, self._device.take_retries(),
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
            whatever_fails.callback(self._planned.remove)
            for undo in self._undo:
                whatever_fails.callback(undo)


def refuse_unplannable(model: Any) -> None:
    """Refuse a model that cannot be planned.

    Raises:
        UsageError: says why, and what to do.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            "memory_gib and memory_fraction plan a whole model, and a list of layers was given. Pass the model, whose "
            "layers are in nn.ModuleList or nn.Sequential."
        )
    if is_compiled(model):
        raise UsageError(
            f"{type(model).__name__} is compiled as a whole: its steps and layers cannot be measured. Pass the model "
            "before torch.compile, and train it uncompiled."
        )
    if len(devices := sorted(map(str, devices_of([model])))) > 1:
        raise UsageError(
            f"{type(model).__name__} is on {', '.join(devices)}: a budget needs a model on one GPU. Move it there "
            '(no device_map="auto"), or swap layers without a budget.'
        )
    for name, module in model.named_modules():
        sharded = {"FSDPModule", "FullyShardedDataParallel"} & {kind.__name__ for kind in type(module).__mro__}
        if sharded:
            raise UsageError(
                f"{name or 'the model'} is sharded ({sharded.pop()}), so its weights are freed between uses: that is "
                "not planned. Use DistributedDataParallel."
            )


def take_over(model: nn.Module) -> list[tuple[list[Callable[[], None]], str]]:
    """Switch off what would work against the planner in a transformers model. Return how to undo each, and a line."""
    found = []
    modules = list(model.modules())
    checkpointing = [module for module in modules if getattr(module, "gradient_checkpointing", False) is True]
    if checkpointing:
        undo = [_switch_off(module, "gradient_checkpointing") for module in checkpointing]
        found.append((undo, "the model's gradient checkpointing is off until close(): the planner decides instead"))
    configs = {id(config): config for module in modules if (config := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    if caching:
        undo = [_switch_off(config, "use_cache") for config in caching]
        found.append((undo, "the model's use_cache is off until close(): a cache would hold keys and values"))
    return found


def _switch_off(owner: Any, name: str) -> Callable[[], None]:
    setattr(owner, name, False)
    return lambda: setattr(owner, name, True)


def _memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return machine_memory_gib()
