"""Swapping of one rank's model chunks: what a run of Megatron's trainer and a model that exists already share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from megatron.swap.autotune.controller import AutoPlan
from megatron.swap.autotune.target import Output, RunParts
from megatron.swap.autotune.training_steps import read_checks
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.plan import Model
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.engine.overrides import override_forward
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.forecast.facts import MegatronFacts, has_sum_in_loss, model_of
from megatron.swap.megatron_lm import accumulators
from megatron.swap.megatron_lm.fp8_weights import recompute_weights
from megatron.swap.megatron_lm.layer import check_one_stack, check_stacks, pipeline_rank
from megatron.swap.megatron_lm.memory_needs import MemoryCheck
from megatron.swap.megatron_lm.optimizer_swap import OptimizerSwap
from megatron.swap.patches import registry
from megatron.swap.patches.registry import AppliedPatches
from megatron.swap.planner.profile import OffloadedState
from megatron.swap.profiling.profiler import Profiler
from megatron.swap.reporting.summary import StepRecord, start_table
from megatron.swap.run.console import Console
from megatron.swap.run.loss import RunLoss
from megatron.swap.run.parts import ActivationParts, Planned
from megatron.swap.run.run_device import RunDevice
from megatron.swap.run.steps import StepLog
from megatron.swap.run.upstream import refuse_fusion


class ModelSwap:
    """Swaps activations and optimizer state of this rank's model chunks.

    Args:
        facts: of the model.
        settings: the settings.
        memory: what the model needs beside what there is.
        num_micro_batches: returns the number of micro-batches of the current step.
        console: takes lines for users.
        has_verdict: the first steps are counted, for the lines at the end of a run.

    Attributes:
        settings: the settings.
        run_device: this rank's device.
        auto: plans while training; ``None``: the policy is fixed.
        parts: the parts that swap activations; ``None`` before the model is built, where saved tensors are not touched,
            and once everything is closed.
        optimizer_swap: offloads optimizer state; ``None`` as ``parts``, and without ``--swap-optimizer``.
        planned: what follows from the settings alone.
        step_log: the records of all steps.
    """

    def __init__(
        self,
        facts: MegatronFacts,
        settings: Settings,
        memory: MemoryCheck,
        num_micro_batches: Callable[[], int],
        console: Console,
        *,
        has_verdict: bool,
    ) -> None:
        self.settings = settings
        self.facts = facts
        self._console = console
        self._ranges = Ranges()
        self.run_device = RunDevice(settings, facts.rank, self._ranges, has_verdict=has_verdict)
        self._num_micro_batches = num_micro_batches
        self.planned = Planned.of(facts, settings, memory, self.describe)
        self.parts: ActivationParts | None = None
        self.optimizer_swap: OptimizerSwap | None = None
        self.auto: AutoPlan | None = None
        self._loss = RunLoss(settings, self.describe, lambda: has_sum_in_loss(self.facts))
        self.step_log = StepLog(settings, console)
        self._profiler: Profiler | None = None
        if settings.profile is not None:
            allocated = self.run_device.allocated_bytes
            self._profiler = Profiler(settings.profile, *settings.profile_steps, facts.rank, self._ranges, allocated)
        self._is_attached = False
        self._lacks_fusion = False
        self._undo: list[Callable[[], None]] = []

    def describe(self) -> Model:
        """Return the model that trains, as far as its facts are known now."""
        return model_of(self.facts, self.settings.chosen_fp8_weights)

    def _say_lost(self, applied: AppliedPatches) -> None:
        """Say which features are lost with the patches that do not fit."""
        for line in registry.lost_features(applied.left_out):
            self._console.say(line)

    # ------------------------------------------------------------------- attach

    def attach(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Put the boundaries around the layers of this rank's model chunks.

        Args:
            chunks: this rank's part of the model, before it is wrapped for data parallelism.

        Returns:
            ``chunks``, as Megatron expects of its hooks.

        Raises:
            UsageError: a pattern of ``--swap-modules`` names no submodule of any layer, ``--swap-cpu-memory-gib`` has
                no room for the model's gradients, layers of the model are in a stack of another kind, the run plans
                itself and the model has several stacks of layers, the model's loss does not run in chunks, or the model
                fuses gradient accumulation in a Megatron where that loses gradients.
        """
        for chunk in chunks:
            if self.settings.acts or self.settings.offload_fraction:
                # They only have to be held until everything is closed.
                self._undo.append(accumulators.hold_grad_accumulators(chunk).clear)
        self._attach(chunks)
        return chunks

    def _attach(self, chunks: Sequence[nn.Module]) -> None:
        if self.settings.acts:
            check_stacks(chunks)
        if self.settings.auto:
            check_one_stack(chunks)
        if self._lacks_fusion:
            refuse_fusion(chunks)
        self._is_attached = True
        self.run_device.make()  # even if nothing is swapped: its memory is counted from here on
        self.run_device.check_room(chunks)
        settings, observer = self.settings, self.run_device.observer
        for chunk in chunks:
            self._undo.append(self._loss.attach(chunk))
            if settings.recomputes_fp8_weights:
                self._undo.append(recompute_weights(chunk))
            if settings.acts or observer is not None:
                self._undo.append(override_forward(chunk, self._observed(chunk)))
            if self.planned.offload is not None:
                if self.optimizer_swap is None:
                    device = self.run_device.device
                    self.optimizer_swap = OptimizerSwap(device, self.planned.offload, self._num_micro_batches)
                self.optimizer_swap.watch(chunk)
        if settings.acts:
            parts = self.parts = self.parts or self._build()
            for chunk in chunks:
                self._undo.append(parts.recorder.watch(chunk))
                ends_in_loss = bool(getattr(chunk, "post_process", True))
                parts.layers.install(chunk, settings.modules, ends_in_loss=ends_in_loss)
                if self.auto is not None:
                    self.auto.watch(chunk)
            self._undo.append(read_checks(parts.engine.saved_tensors.checks, chunks))

    def _observed(self, chunk: nn.Module) -> Callable[..., Any]:
        """Return the forward of ``chunk`` in contexts that count and record the tensors saved outside its layers."""
        inner, observer = chunk.forward, self.run_device.observer

        def forward(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                if observer is not None:
                    stack.enter_context(observer.context(chunk))
                if self.parts is not None:
                    stack.enter_context(self.parts.layers.layers.around_layers(chunk))
                return inner(*args, **kwargs)

        return forward

    def _build(self) -> ActivationParts:
        settings, planned = self.settings, self.planned
        on_full = self._on_tier_full if settings.auto else None
        parts = ActivationParts.build(settings, planned, self.run_device, self._ranges, self._take_peak, on_full)
        if planned.target is not None:
            of_run = RunParts(
                layers=parts.layers.layers,
                device=self.run_device.device,
                host_tier=parts.machine.host_tier,
                recorder=parts.recorder,
                footprint=parts.engine.saved_tensors.footprint,
                pipeline_rank=pipeline_rank(),
                num_micro_batches=self._num_micro_batches,
                host_bytes=lambda: parts.machine.pool.limit_bytes,
                take_peak=self._take_peak,
                offloaded_state=self._offloaded_state,
                set_offload_fraction=self._set_offload_fraction,
                guard=None if settings.oom_guard else parts.machine.guard,
            )
            self.auto = AutoPlan(planned.target, of_run, Output(self._console.say, self._console.say_here))
        reserved_bytes = parts.machine.tier.stats().reserved_bytes
        limits = planned.host.limit_bytes, planned.host.guard_bytes
        for line in start_table(settings, planned.num_layers, reserved_bytes, *limits, planned.needs):
            self._console.say(line)
        return parts

    def _on_tier_full(self, error: SwapError) -> None:
        """Report to the planner that the tier has no room for a storage, which is therefore kept."""
        if self.auto is not None:
            self.auto.tier_is_full(error)

    def _take_peak(self) -> tuple[int, int]:
        # The planner decides about optimizer state too, so the state that is kept on the device counts.
        is_planned = self.settings.plans_optimizer
        return self.run_device.take_peak(self._attached_optimizer_swap().kept_bytes if is_planned else 0)

    def _set_offload_fraction(self, fraction: float) -> None:
        self._attached_optimizer_swap().set_offload_fraction(fraction)

    def _offloaded_state(self) -> OffloadedState | None:
        return self._attached_optimizer_swap().offloaded_state() if self.settings.plans_optimizer else None

    def _attached_optimizer_swap(self) -> OptimizerSwap:
        if self.optimizer_swap is None:
            raise unknown_model()
        return self.optimizer_swap

    # ------------------------------------------------- called by patched functions

    def around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for the forward of ``block``, a ``TransformerBlock``, with full recomputation.

        Raises:
            UsageError: no model was attached.
        """
        if self.parts is None:
            raise unknown_model()
        return self.parts.layers.around_checkpointed_forward(block)

    def recomputer(self) -> Recomputer | None:
        """Return the recomputer of this rank; ``None`` before the model is built, or if nothing is recomputed."""
        return None if self.parts is None else self.parts.recomputer

    # ----------------------------------------------------------- between two steps

    def on_optimizer_built(self, optimizer: Any) -> None:
        """Adapt the ``optimizer`` that Megatron has built, and give activations the host memory that it leaves.

        Raises:
            UsageError: no model was attached, or the class of the optimizer is unknown.
            HostMemoryError, DiskError: there is no room for its state.
        """
        self._attached_optimizer_swap().attach(optimizer)
        self._reserve_host_memory()

    def _reserve_host_memory(self) -> None:
        swap = self._attached_optimizer_swap()
        self.planned.state_memory.resize(swap.needed_bytes)
        if self.parts is not None:
            pool = self.parts.machine.pool
            pool.reserve(min(self.planned.host.least_bytes, pool.limit_bytes))
        self._console.say(swap.summary_line())

    def step_ended(self, iteration: int, losses: dict[str, torch.Tensor], grad_norm: Any) -> StepRecord:
        """Record the step that has ended, and run the planner.

        Args:
            iteration: its number, from 1.
            losses: by name, tensors of one element; empty on all pipeline stages but the last.
            grad_norm: of all ranks, or ``None``.

        Raises:
            Infeasible: the planner found no plan that fits the budget.
        """
        parts, auto, device = self.parts, self.auto, self.run_device.device
        step = self.step_log.take(iteration, losses, grad_norm, device, None if parts is None else parts.manager)
        if self._profiler is not None:
            self._profiler.step_ended(iteration)
        if parts is not None:
            checks = parts.engine.saved_tensors.checks
            checks.read()  # before a checkpoint; Megatron has waited for this backward already, to clip its gradients
            self._console.say_here(checks.take_lines())
            parts.recorder.step_ended(iteration + 1)
        if auto is not None:
            auto.step_ended(iteration, step.short_bytes, step.num_alloc_retries)
        self.run_device.step_ended(iteration, is_settled=auto is None or auto.is_settled)
        if self.optimizer_swap is not None:
            self.optimizer_swap.step_ended(
                overlaps=auto is None or not auto.is_measuring, is_same_plan=auto is None or not auto.has_switched
            )
            self.planned.state_memory.resize(self.optimizer_swap.needed_bytes)
        if self.planned.plan_run is not None:
            self._console.say_here(self.planned.plan_run.step_ended())
        target = self.planned.target
        if (line := self._loss.step_ended(None if target is None else target.budget_gib)) is not None:
            self._console.say(line)
        if parts is not None and parts.recomputer is not None:
            self.step_log.say_refused(parts.recomputer)
        return step

    # -------------------------------------------------------------------- close

    def abandon(self) -> None:
        """Uninstall everything after a failure: without a collective, since other ranks may be anywhere, and without
        waiting for copies, since the device may be broken."""
        if self._profiler is not None:
            self._profiler.abandon()
        self._uninstall()
        if self.parts is not None:
            self.parts.machine.guard.end()

    def close(self) -> None:
        """Uninstall everything from Megatron and release all memory. Idempotent.

        Call it after the last backward.

        Raises:
            DiskError: a write failed, so the state on disk is incomplete. All else is uninstalled and released.
        """
        parts, swap = self.parts, self.optimizer_swap
        self.optimizer_swap = None
        with ExitStack() as last_first:  # runs every step even if one fails: a disk may fail now
            last_first.callback(setattr, self, "parts", None)
            if self.planned.disk is not None:
                last_first.callback(self.planned.disk.close)
            if parts is not None:
                last_first.callback(parts.machine.tier.close)
                last_first.callback(parts.manager.drain)
                last_first.callback(parts.engine.saved_tensors.checks.read)
            elif self.run_device.is_made:
                last_first.callback(self.run_device.device.close)
            last_first.callback(self._uninstall)
            if swap is not None:
                last_first.callback(swap.close)

    def _uninstall(self) -> None:
        if self.optimizer_swap is not None:
            self.optimizer_swap.abandon()
        if self.auto is not None:
            self.auto.close()
        if self.parts is not None:
            self.parts.recorder.abandon()
        while self._undo:
            self._undo.pop()()
        if self.parts is not None:
            self.parts.layers.remove()


def unknown_model() -> UsageError:
    """Return the error of a run whose model was not attached."""
    return UsageError(
        "SwapSession.install does not know the model that trains: pass it the model_config of that model, or "
        "pass the model's chunks to attach before they are wrapped for data parallelism."
    )
