"""The composition root of a Megatron run: install, attach, run, report, close."""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from megatron.swap.autotune.controller import AutoPlan
from megatron.swap.autotune.target import Output, PlanTarget, RunParts
from megatron.swap.common.collectives import gather
from megatron.swap.common.config import SwapConfig
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.engine.layer_hooks import override_forward
from megatron.swap.engine.policy import policy_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.megatron_lm import accumulators
from megatron.swap.megatron_lm.arguments import device_memory_gib, recompute_kinds, swap_config
from megatron.swap.megatron_lm.compatibility import check_model_config
from megatron.swap.megatron_lm.host_share import host_share
from megatron.swap.megatron_lm.layer import check_one_stack, num_micro_batches, pipeline_rank
from megatron.swap.megatron_lm.memory_needs import check_memory
from megatron.swap.megatron_lm.optimizer_swap import OptimizerSwap, offload_settings
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.native.guarding import build_guard
from megatron.swap.patches import registry
from megatron.swap.planner.flags import model_of
from megatron.swap.planner.profile import OffloadedState
from megatron.swap.profiling.profiler import Profiler
from megatron.swap.reporting.plan_run import PlanRun
from megatron.swap.reporting.summary import memory_lines, start_table
from megatron.swap.session import report as reports
from megatron.swap.session.console import Console, print_at_end
from megatron.swap.session.parts import ActivationParts, Planned
from megatron.swap.session.run_device import RunDevice
from megatron.swap.session.steps import StepLog
from megatron.swap.session.upstream import patches_of, refuse_fusion, supply_fusion_kernel, switch_fusion_off


class SwapSession:
    """One training run of Megatron's trainer on this rank.

    A script calls ``install``, and ``close`` if training never begins. Megatron calls the rest: ``attach`` when the
    model is built, the ``on_…`` methods through patches.

    Args:
        args: Megatron's parsed arguments, with those of ``add_swap_args``.
        config: the settings in ``args``.

    Attributes:
        config: the settings.
        run_device: this rank's device.
        auto: plans while training; ``None``: the policy is fixed.
        parts: the parts that swap activations; ``None`` before the model is built, where saved tensors are not touched,
            and once the session is closed.
        optimizer_swap: offloads optimizer state; ``None`` as ``parts``, and without ``--swap-optimizer``.
        planned: what follows from the settings alone.
        step_log: the records of all steps.
    """

    def __init__(self, args: Namespace, config: SwapConfig) -> None:
        self.config = config
        self._args = args
        self._console = Console(config.log_level, args.rank, args.world_size)
        self._ranges = Ranges()
        self.run_device = RunDevice(config, args.rank, self._ranges)
        self._memory_check = check_memory(args, config)
        kinds = recompute_kinds(args, config)
        self._target = PlanTarget(config, model_of(args), device_memory_gib(args), kinds) if config.auto else None
        self.planned = self._plan(kinds)
        self.parts: ActivationParts | None = None
        self.optimizer_swap: OptimizerSwap | None = None
        self.auto: AutoPlan | None = None
        self.step_log = StepLog(config, self._console, args.world_size)
        self._profiler = self._make_profiler(config.profile) if config.profile is not None else None
        self._is_attached = False
        self._lacks_fusion = False
        self._undo: list[Callable[[], None]] = []

    def _plan(self, kinds: tuple[str, ...]) -> Planned:
        config, args = self.config, self._args
        policy = policy_of(config) if self._target is None else self._target.policy
        swaps = any(map(policy.swaps_layer, range(args.num_layers)))
        wants_plan = config.plan is not None or (config.save_plan is not None and not config.auto)
        plan_run = PlanRun(config, model_of(args)) if wants_plan else None
        host = host_share(config, args, swaps, self._memory_check.capacity)
        state_memory = host.reserve_state(config)
        disk = DiskFile(config.disk_dir, host.disk_bytes) if config.disk_dir is not None else None
        return Planned(policy, kinds, swaps, host, state_memory, disk, plan_run)

    # ------------------------------------------------------------------ install

    @classmethod
    def install(cls, args: Namespace, model_config: Any = None) -> SwapSession:
        """Prepare a training run for swapping.

        Args:
            args: Megatron's parsed arguments, with those of ``add_swap_args``.
            model_config: Megatron's model config (``gpt_config_from_args``), whose hooks receive the built model. A
                script without one passes its model chunks to ``attach`` before they are wrapped.

        Raises:
            UsageError: the settings cannot work; nothing was changed.
            HostMemoryError: the host has less memory than the run needs at least.
            PatchError: this run needs patches that were not written for this Megatron.
        """
        check_model_config(model_config)
        config = swap_config(args)
        if config.oom_guard:
            build_guard(on_gpu=torch.cuda.is_available())
        session = cls(args, config)
        for line in registry.lost_features(supply_fusion_kernel(args)):
            session._console.say(line)
        if not config.does_anything:
            return session
        try:
            patches = patches_of(args, config, session.planned.kinds, session)
            applied = registry.apply(patches.needs, patches.optional)
        except BaseException:
            session.close()
            raise
        session._undo.append(applied.revert)
        for line in registry.lost_features(applied.left_out):
            session._console.say(line)
        session._lacks_fusion = switch_fusion_off(applied.left_out, args, model_config)
        if model_config is not None:
            hooks = model_config.pre_wrap_hooks
            hooks.append(session.attach)
            session._undo.append(functools.partial(_remove_from, hooks, session.attach))
        return session

    def attach(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Put the boundaries around the layers of this rank's model chunks.

        Args:
            chunks: this rank's part of the model, before it is wrapped for data parallelism.

        Returns:
            ``chunks``, as Megatron expects of its hooks.

        Raises:
            UsageError: a pattern of ``--swap-modules`` names no submodule of any layer, ``--swap-cpu-memory-gib`` has
                no room for the model's gradients, the run plans itself and the model has several stacks of layers, or
                the model fuses gradient accumulation in a Megatron where that loses gradients.
        """
        if self.config.auto:
            check_one_stack(chunks)
        if self._lacks_fusion:
            refuse_fusion(chunks)
        self._is_attached = True
        self.run_device.make()  # even if nothing is swapped: its memory is counted from here on
        self.run_device.check_room(chunks)
        config, observer = self.config, self.run_device.observer
        for chunk in chunks:
            if config.acts or observer is not None:
                self._undo.append(override_forward(chunk, self._observed(chunk)))
            if config.acts or config.optimizer:
                # They only have to be held until the session is closed.
                held = accumulators.hold_grad_accumulators(chunk)
                self._undo.append(held.clear)
            if config.optimizer:
                self.optimizer_swap = self.optimizer_swap or self._build_optimizer_swap()
                self.optimizer_swap.watch(chunk)
        if config.acts:
            parts = self.parts = self.parts or self._build()
            for chunk in chunks:
                self._undo.append(parts.recorder.watch(chunk))
                ends_in_loss = bool(getattr(chunk, "post_process", True))
                parts.boundaries.install(chunk, config.modules, ends_in_loss=ends_in_loss)
                if self.auto is not None:
                    self.auto.watch(chunk)
        return chunks

    def _build_optimizer_swap(self) -> OptimizerSwap:
        planned = self.planned
        settings = offload_settings(self.config, self._args, planned.state_memory.num_bytes, planned.disk)
        return OptimizerSwap(self.run_device.device, settings)

    def _attached_optimizer_swap(self) -> OptimizerSwap:
        if self.optimizer_swap is None:
            raise _unknown_model()
        return self.optimizer_swap

    def _observed(self, chunk: nn.Module) -> Callable[..., Any]:
        """Return the forward of ``chunk`` in contexts that count and record the tensors saved outside its layers."""
        inner, observer = chunk.forward, self.run_device.observer

        def forward(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                if observer is not None:
                    stack.enter_context(observer.context(chunk))
                if self.parts is not None:
                    stack.enter_context(self.parts.boundaries.around_layers(chunk))
                return inner(*args, **kwargs)

        return forward

    def _build(self) -> ActivationParts:
        config, planned = self.config, self.planned
        parts = ActivationParts.build(
            config, planned, self.run_device, self._ranges, self._take_peak, self._on_tier_full if config.auto else None
        )
        if self._target is not None:
            of_run = RunParts(
                boundaries=parts.boundaries,
                device=self.run_device.device,
                host_tier=parts.host_tier,
                recorder=parts.recorder,
                footprint=parts.engine.saved_tensors.footprint,
                pipeline_rank=pipeline_rank(),
                num_micro_batches=num_micro_batches,
                host_bytes=lambda: parts.pool.limit_bytes,
                take_peak=self._take_peak,
                offloaded_state=self._offloaded_state,
                set_offload_fraction=self._set_offload_fraction,
                guard=None if config.oom_guard else parts.guard,
            )
            self.auto = AutoPlan(self._target, of_run, Output(self._console.say, self._console.say_here))
        if self._console.is_first:
            limits = planned.host.limit_bytes, planned.host.guard_bytes
            needs, reserved_bytes = self._memory_check.line, parts.tier.stats().reserved_bytes
            print(start_table(config, self._args.num_layers, reserved_bytes, *limits, needs), flush=True)
        return parts

    def _on_tier_full(self, error: SwapError) -> None:
        """Report to the planner that the tier has no room for a storage, which is therefore kept."""
        if self.auto is not None:
            self.auto.tier_is_full(error)

    def _make_profiler(self, target: str) -> Profiler:
        steps, rank = self.config.profile_steps, self._args.rank
        return Profiler(target, *steps, rank, self._ranges, self.run_device.allocated_bytes)

    def _take_peak(self) -> tuple[int, int]:
        # The planner decides about optimizer state too, so the state that is kept on the device counts.
        is_planned = self.config.optimizer_auto
        return self.run_device.take_peak(self._attached_optimizer_swap().kept_bytes if is_planned else 0)

    def _set_offload_fraction(self, fraction: float) -> None:
        self._attached_optimizer_swap().set_offload_fraction(fraction)

    def _offloaded_state(self) -> OffloadedState | None:
        return self._attached_optimizer_swap().offloaded_state() if self.config.optimizer_auto else None

    # ------------------------------------------------- called by Megatron's trainer

    def around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for the forward of ``block``, a ``TransformerBlock``, with full recomputation.

        Raises:
            UsageError: no model was attached.
        """
        if self.parts is None:
            raise _unknown_model()
        return self.parts.boundaries.around_checkpointed_forward(block)

    def recomputer(self) -> Recomputer | None:
        """Return the recomputer of this rank; ``None`` before the model is built, or if nothing is recomputed."""
        return None if self.parts is None else self.parts.recomputer

    def on_main_param_created(self, param: torch.Tensor) -> None:
        """Offload ``param``, which Megatron's optimizer has just made, if it is to be offloaded.

        Raises:
            UsageError: no model was attached.
            HostMemoryError, DiskError: there is no room for it.
        """
        self._attached_optimizer_swap().on_main_param_created(param)

    def on_optimizer_built(self, optimizer: Any) -> None:
        """Adapt the ``optimizer`` that Megatron has built, and give activations the host memory that it leaves.

        Raises:
            UsageError: no model was attached, or the class of the optimizer is unknown.
            HostMemoryError, DiskError: there is no room for its state.
        """
        swap = self._attached_optimizer_swap()
        swap.attach(optimizer)
        self.planned.state_memory.resize(swap.needed_bytes)
        if self.parts is not None:
            pool = self.parts.pool
            pool.reserve(min(self.planned.host.least_bytes, pool.limit_bytes))
        self._console.say(swap.summary_line())

    def on_begin(self) -> None:
        """Refuse to train a model that was not attached.

        Raises:
            UsageError: it was not, and saved tensors or optimizer state are to be offloaded or counted.
        """
        needs_model = self.config.acts or self.config.optimizer or self.run_device.observer is not None
        if needs_model and not self._is_attached:
            raise _unknown_model()

    def on_iteration(
        self,
        iteration: int,
        losses: dict[str, torch.Tensor],
        grad_norm: Any,
        is_logged: bool,
        writer: Any,
        averages_next: bool = False,
    ) -> None:
        """Record the iteration that has ended, run the planner, and print the iteration's line.

        Args:
            iteration: its number, from 1.
            losses: by name, tensors of one element; empty on all pipeline stages but the last.
            grad_norm: of all ranks, or ``None``.
            is_logged: whether Megatron has printed its own line.
            writer: Megatron's TensorBoard writer, or ``None``.
            averages_next: Megatron's next line is a mean over this iteration too.

        Raises:
            Infeasible: the planner found no plan that fits the budget.
        """
        parts, auto, device = self.parts, self.auto, self.run_device.device
        step = self.step_log.take(iteration, losses, grad_norm, device, None if parts is None else parts.manager)
        if self._profiler is not None:
            self._profiler.step_ended(iteration)
        if parts is not None:
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
        if parts is not None and parts.recomputer is not None:
            self.step_log.say_refused(parts.recomputer)
        if parts is not None and is_logged:
            self.step_log.show(step, device.peak_bytes(), writer)
            if averages_next:
                self._console.say(
                    f"Megatron's next line shows the mean loss and time of iterations {iteration} to "
                    f"{iteration + self._args.log_interval}, with or without swapping"
                )

    def on_finish(self, failure: BaseException | None, chunks: Sequence[nn.Module], optimizer: Any) -> None:
        """Report and close; after a failure only uninstall everything from Megatron.

        Args:
            failure: the exception that ended training, or ``None``.
            chunks: the model on this rank.
            optimizer: Megatron's, or ``None``.

        Raises:
            DiskError: a write failed, so the state on disk is incomplete.
            OSError: the plan or the summary cannot be written.
        """
        if failure is not None and not (isinstance(failure, SystemExit) and failure.code in (None, 0)):
            # Other ranks may be anywhere and the device may be broken: no collective, no waiting for copies, and no
            # summary that would look like a success. Megatron raises the failure itself.
            if self._profiler is not None:
                self._profiler.abandon()
            if isinstance(failure, torch.OutOfMemoryError):
                self._console.say_here(memory_lines(self._memory(self._report(), chunks, optimizer)))
            self._uninstall()
            if self.parts is not None:
                self.parts.guard.end()
            return
        if self._profiler is not None:
            self._profiler.close()
        mine = self._report()
        if self.config.summary is not None:
            mine.memory = self._memory(mine, chunks, optimizer)
        self.close()
        if self.planned.plan_run is not None:
            self.planned.plan_run.save()
        if self.auto is not None:
            self.auto.finish()
        of_ranks = gather(mine)
        lines: list[str] = []
        if of_ranks is not None:
            planning = self.auto.summary() if self.auto is not None else None
            summary = reports.write_summary(self.config.summary, self._args.num_layers, of_ranks, planning)
            lines = reports.lines_of(summary, self.config, self._args.swap_layers, of_ranks, swaps=self.planned.swaps)
        if (self.planned.swaps or self.config.oom_guard) and not self._console.is_quiet:
            print_at_end(lines, has_ended=failure is not None)

    def _report(self) -> reports.RankReport:
        return reports.report_of(self.step_log.records, self.run_device, self.parts, self.optimizer_swap)

    def _memory(
        self, report: reports.RankReport, chunks: Sequence[nn.Module], optimizer: Any
    ) -> list[reports.MemoryRow]:
        return reports.memory_of(report, self.run_device, self.optimizer_swap, chunks, optimizer)

    # -------------------------------------------------------------------- close

    def close(self) -> None:
        """Uninstall everything from Megatron and release all memory. Idempotent.

        Called at the end of training. A script calls it if training never begins after ``install``.

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
                last_first.callback(parts.tier.close)
                last_first.callback(parts.manager.drain)
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
            self.parts.boundaries.remove()


def _remove_from(hooks: list[Any], hook: Any) -> None:
    if hook in hooks:
        hooks.remove(hook)


def _unknown_model() -> UsageError:
    return UsageError(
        "SwapSession.install does not know the model that trains: pass it the model_config of that model, or "
        "pass the model's chunks to attach before they are wrapped for data parallelism."
    )
