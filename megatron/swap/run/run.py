"""A run: a model that swaps, from its first layer's boundary to ``close``. One class for every kind of model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.swap.common.counters import Totals
from megatron.swap.common.plan import Infeasible
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.engine.function_transforms import untransformed
from megatron.swap.engine.overrides import NotCopied, in_backward, override_forward
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.settings import Instruments
from megatron.swap.layers.learned import LearnedLayers
from megatron.swap.models.hints import ModelHints
from megatron.swap.params.module_weights import WeightSwap
from megatron.swap.planner.profile import OffloadedState
from megatron.swap.planner.table import plan_heading, plan_table
from megatron.swap.planning.controller import AutoPlan
from megatron.swap.planning.target import RunParts
from megatron.swap.planning.training_steps import TrainingSteps, read_checks
from megatron.swap.profiling.profiler import Profiler
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.profiling.saved_tensor_hooks import is_traced
from megatron.swap.reporting.summary import StepRecord, start_table
from megatron.swap.run.build import Parts, Planned, build, real_machine
from megatron.swap.run.console import Console
from megatron.swap.run.run_device import RunDevice
from megatron.swap.run.stats import Stats
from megatron.swap.run.step_log import StepLog

if TYPE_CHECKING:
    from typing_extensions import Self

    from megatron.swap.megatron_lm.optimizer_swap import OptimizerSwap


class Run(NotCopied):
    """A model whose layers swap, until ``close`` or the end of its ``with``.

    ``settings`` are the run's, ``hints`` the model's. ``console`` takes lines for users.
    """

    def __init__(
        self, settings: Settings, hints: ModelHints, console: Console, run_device: RunDevice,
        policy: Policy | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.hints = hints
        self.run_device = run_device
        # The parts that swap activations. None until the model is there, after `close`, and if no saved tensor is
        # touched.
        self.parts: Parts | None = None
        self.optimizer_swap: OptimizerSwap | None = None  # offloads state; None as for `parts`, and without offload
        self.auto: AutoPlan | None = None  # plans while training; None if the policy is fixed
        self.weights: WeightSwap | None = None  # frozen weights in host memory; None if all are on the device
        self.steps = TrainingSteps(self._end_step)  # counts the training steps
        self.step_log = StepLog(settings, console)  # records of all steps
        self._console = console
        self._profiler: Profiler | None = None
        if settings.profile is not None:
            allocated, ranges = run_device.allocated_bytes, run_device.ranges
            self._profiler = Profiler(settings.profile, *settings.profile_steps, console.rank, ranges, allocated)
        self._last: Stats | None = None
        self._plan = ""  # the table of a run that is over
        self._undo: list[Callable[[], None]] = []
        self.planned = Planned.of(settings, hints, run_device, policy)  # the last, since it opens the file on disk

    def attach(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Put the boundaries around the layers of this rank's model ``chunks``. Return them, as Megatron's hooks do.

        Raises:
            UsageError: the model cannot be swapped with these settings, a pattern of ``--swap-modules`` names no
                submodule of any layer, or ``--swap-cpu-memory-gib`` has no room for the model's gradients.
        """
        _ = self.run_device.device  # made even if nothing is swapped: its memory is counted from here on
        self.run_device.check_room(chunks)
        for undo, line in self.hints.prepare(chunks, self.settings):
            self._undo += undo
            if line is not None:
                self._console.say(line)
        for chunk in chunks:
            if self.settings.attaches or self.run_device.observer is not None:
                self._undo += self._watched(chunk)
            if self.settings.offload_fraction:
                if self.optimizer_swap is None:
                    self.optimizer_swap = self.hints.state_store(
                        self.settings, self.run_device.device, self.num_micro_batches,
                        self.planned.state_memory.num_bytes, self.planned.disk,
                    )  # fmt: skip
                self.optimizer_swap.watch(chunk)
        if self.settings.acts:
            parts = self.parts or self._build()
            for chunk in chunks:
                parts.recorder.add_chunk(chunk)
                parts.layers.add(chunk)
            if chunks:
                self._undo.append(read_checks(parts.engine.saved_tensors.checks, chunks))
        return chunks

    def begin(self, optimizer: Any = None) -> Self:
        """Swap a model that exists, in a loop of another author: its steps are seen. Return this run.

        A step ends with the ``optimizer``'s ``step``. Without ``optimizer`` it ends at the first forward after an
        optimizer of the model's parameters has stepped.

        Raises:
            SwapError: the model cannot be swapped; it is as before.
        """
        chunks = self.hints.chunks
        try:
            self._undo += map(self._refuse_copies_of, chunks)
            self.attach(chunks)
            if self.settings.offload_fraction:
                self._attached_optimizer_swap().take_over(optimizer)
                self._reserve_host_memory()
            if chunks:
                self._undo.append(self.steps.follow(optimizer, chunks))
        except BaseException:
            self.close()
            raise
        return self

    def _watched(self, chunk: nn.Module) -> list[Callable[[], None]]:
        """Learn of each forward of ``chunk``, and run it in contexts. Return what ends that."""
        inner, observer = chunk.forward, self.run_device.observer

        @untransformed
        def begins(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if self.steps.is_followed and chunk is self.hints.chunks[0]:
                self._forward_begins(arguments, options)
            if self.auto is not None:
                self.auto.chunk_begins()
            if self.optimizer_swap is not None:
                self.optimizer_swap.chunk_begins()
            if self.parts is not None:
                self.parts.recorder.chunk_begins(chunk)

        def ends(*_: object) -> None:
            if self.parts is not None:
                self.parts.recorder.chunk_ends(chunk)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return inner(*args, **kwargs)
            with ExitStack() as stack:
                if observer is not None:
                    stack.enter_context(observer.context(chunk))
                if self.parts is not None:
                    stack.enter_context(self.parts.layers.around(chunk))
                return inner(*args, **kwargs)

        restore = override_forward(chunk, forward)  # before the hooks, which would stay if it were refused
        # Before all other hooks: the step that is over must have ended when they see the next one.
        before = chunk.register_forward_pre_hook(begins, prepend=True, with_kwargs=True)
        return [before.remove, chunk.register_forward_hook(ends).remove, restore]

    def _build(self) -> Parts:
        settings, planned, device = self.settings, self.planned, self.run_device.device
        ranges, observer = self.run_device.ranges, self.run_device.observer
        disk = planned.disk if planned.swaps else None
        machine = real_machine(settings, device, planned.host, planned.state_memory.budget, disk)
        recorder = Recorder(device, ranges, self._take_peak)
        instruments = Instruments(
            ranges=ranges, observer=observer, recorder=recorder,
            on_saved=None if planned.plan_run is None else planned.plan_run.note,
            on_full=self._on_tier_full if settings.auto else None,
        )  # fmt: skip
        recomputes, wrappers = bool(planned.kinds), self.hints.wrappers()
        engine = build(settings, planned.policy, machine, instruments, recomputes=recomputes, wrappers=wrappers)
        try:
            layers = self.hints.bound(
                engine, planned.policy, settings, self._console.errors,
                lambda: self.auto is None or self.auto.is_measuring, machine.pool.has_room,
            )  # fmt: skip
        except BaseException:
            machine.guard.end()
            machine.tier.close()
            raise
        parts = self.parts = Parts(machine, engine, recorder, layers)  # now: what fails next is undone by `release`
        if planned.target is not None:
            of_run = RunParts(
                layers=layers, device=device, host_tier=machine.host_tier, recorder=recorder,
                footprint=engine.saved_tensors.footprint, pipeline_rank=self.hints.pipeline_rank(),
                num_micro_batches=self.num_micro_batches, host_bytes=lambda: machine.pool.limit_bytes,
                take_peak=self._take_peak, offloaded_state=self._offloaded_state,
                set_offload_fraction=lambda fraction: self._attached_optimizer_swap().set_offload_fraction(fraction),
                guard=None if settings.oom_guard else machine.guard,
            )  # fmt: skip
            self.auto = AutoPlan(planned.target, of_run, self._console.say, self._console.say_here)
        if self.hints.tells_details:
            reserved_bytes, host = machine.tier.stats().reserved_bytes, planned.host
            limits = host.limit_bytes, host.guard_bytes
            for line in start_table(settings, self.hints.num_layers, reserved_bytes, *limits, self.hints.needs):
                self._console.say(line)
        return parts

    def num_micro_batches(self) -> int:
        """Return the number of micro-batches of the current step."""
        return self.steps.num_micro_batches

    def _on_tier_full(self, error: SwapError) -> None:
        if self.auto is not None:
            self.auto.tier_is_full(error)

    def _take_peak(self) -> tuple[int, int]:
        # The planner decides about optimizer state too, so the state that is kept on the device counts.
        is_planned = self.settings.plans_optimizer
        return self.run_device.take_peak(self._attached_optimizer_swap().kept_bytes if is_planned else 0)

    def _offloaded_state(self) -> OffloadedState | None:
        return self._attached_optimizer_swap().offloaded_state() if self.settings.plans_optimizer else None

    def _attached_optimizer_swap(self) -> OptimizerSwap:
        if self.optimizer_swap is None:
            raise unknown_model()
        return self.optimizer_swap

    def _reserve_host_memory(self) -> None:
        """Give activations the host memory that optimizer state leaves, now that its size is known."""
        swap = self._attached_optimizer_swap()
        self.planned.state_memory.resize(swap.needed_bytes)
        if self.parts is not None:
            pool = self.parts.machine.pool
            pool.reserve(min(self.planned.host.least_bytes, pool.limit_bytes))
        self._console.say(swap.summary_line())

    def _forward_begins(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if in_backward() or is_traced():
            return
        if not torch.is_grad_enabled():
            self.steps.evaluation_begins()
            return
        if self.parts is not None:
            self.parts.engine.saved_tensors.checks.before_step()  # loops without an optimizer of torch
        self.steps.forward_begins()
        if self.parts is not None:
            self.parts.layers.begin_forward()
        if self.steps.number == 0 and self.steps.num_forwards == 1:
            self.hints.first_forward(arguments, options, self.settings)

    def step(self) -> None:
        """Tell that a training step has ended: after the optimizer's step, before the next forward, on every rank.

        The first call ends the watch on steps of optimizers. A call without a forward since the last step's end does
        nothing.

        Raises:
            Infeasible: the planner found no plan that fits the budget.
        """
        if self.parts is not None:
            self.parts.engine.saved_tensors.checks.before_step()
        self.steps.tell()

    def _end_step(self, number: int) -> None:
        if self._last is None:
            with self._console.errors():
                self.step_ended(number)

    def step_ended(
        self, iteration: int, losses: dict[str, torch.Tensor] | None = None, grad_norm: Any = None
    ) -> StepRecord:
        """Record the step that has ended, and run the planner.

        ``iteration`` counts from 1. ``losses`` are tensors of one element by name, or empty where they are not known.
        ``grad_norm`` is of all ranks.

        Raises:
            Infeasible: the planner found no plan that fits the budget.
        """
        parts, auto, device = self.parts, self.auto, self.run_device.device
        was_known = self._learn_order()
        step = self.step_log.take(iteration, losses or {}, grad_norm, device, None if parts is None else parts.manager)
        if self._profiler is not None:
            self._profiler.step_ended(iteration)
        if parts is not None:
            checks = parts.engine.saved_tensors.checks
            if self.hints.waits_between_steps:
                checks.read()  # before a checkpoint
            self._console.say_here(checks.take_lines())
            parts.recorder.step_ended(iteration + 1)
        if auto is not None:
            has_new_numbers = iteration > 1 and not was_known and self._is_order_known
            try:
                auto.step_ended(iteration, step.short_bytes, step.num_alloc_retries, has_new_numbers=has_new_numbers)
            except Infeasible as error:
                assert self.planned.target is not None
                raise self.hints.explained(error, self.planned.target.budget_gib) from error.__cause__
        self.run_device.step_ended(iteration, is_settled=auto is None or auto.is_settled)
        if self.optimizer_swap is not None:
            self.optimizer_swap.step_ended(
                overlaps=auto is None or not auto.is_measuring, is_same_plan=auto is None or not auto.has_switched
            )
            self.planned.state_memory.resize(self.optimizer_swap.needed_bytes)
        if self.planned.plan_run is not None:
            self._console.say_here(self.planned.plan_run.step_ended())
        target = self.planned.target
        if (line := self.hints.step_line(None if target is None else target.budget_gib)) is not None:
            self._console.say(line)
        if parts is not None and parts.recomputer is not None and self.hints.tells_details:
            self.step_log.say_refused(parts.recomputer)
        return step

    @property
    def _is_order_known(self) -> bool:
        layers = None if self.parts is None else self.parts.layers
        return not isinstance(layers, LearnedLayers) or layers.is_known

    def _learn_order(self) -> bool:
        """Learn the order of the layers, if the step has shown it. Return whether it was known before."""
        was_known = self._is_order_known
        if not was_known and self.auto is not None and self.parts is not None:
            layers, model = self.parts.layers, self.hints.chunks[0]
            assert isinstance(layers, LearnedLayers)
            for line in learn_order(layers, model, self.auto, self.settings.window_bytes(None)):
                self._console.say(line)
        return was_known

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """All layers of this rank, in order. Layers that are not swapped have boundaries too."""
        return self.hints.layers

    @property
    def chosen(self) -> tuple[int, ...]:
        """The numbers of the layers that are swapped."""
        return tuple(filter(self.planned.policy.swaps_layer, range(self.hints.num_layers)))

    def stats(self) -> Stats:
        """Return the figures until now, or until ``close``. Never waits for the device."""
        return self._last or self._figures()

    def _figures(self) -> Stats:
        auto, parts, target, swap = self.auto, self.parts, self.planned.target, self.optimizer_swap
        last, plan = (None, None) if auto is None else (auto.last_step, auto.plan)
        predicted = None if plan is None else plan.predicted
        held_bytes = host_peak_bytes = state_bytes = stayed_bytes = num_rescues = rescued_bytes = 0
        host_bytes = 0 if self.weights is None else self.weights.stats.host_bytes
        totals = Totals()
        if parts is not None:
            totals, host = parts.manager.counters.totals(), parts.machine.pool.stats
            stayed_bytes = sum(layer.stayed_bytes for layer in parts.manager.counters.layers.values())
            held_bytes, host_peak_bytes = host.leased_bytes, host.leased_peak_bytes
            num_rescues, rescued_bytes = parts.machine.guard.total_rescues()
            host_bytes += host.reserved_bytes
        if swap is not None:
            host_bytes += swap.reserved_bytes
            state_bytes = sum(one.num_bytes for one in swap.offloaded_tensors())
        return Stats(
            totals.out_bytes, totals.in_bytes, stayed_bytes, totals.num_late, totals.wait_ms, held_bytes,
            host_peak_bytes, host_bytes, state_bytes, num_rescues, rescued_bytes, self.steps.number,
            stage=None if auto is None else auto.stage, budget_gib=None if target is None else target.budget_gib,
            predicted_gib=None if predicted is None else predicted.peak_gib,
            predicted_ms=None if predicted is None else predicted.step_ms,
            peak_gib=None if last is None else last.peak_gib, step_ms=None if last is None else last.ms,
        )  # fmt: skip

    def plan(self) -> str:
        """Return a table with the planner's action for each saved tensor of each layer, and why; its stage before."""
        if self._plan:
            return self._plan
        if self.planned.target is None:
            return "no planner decides: the layers were chosen"
        auto = self.auto
        if auto is None or auto.plan is None:
            stage = "closed" if auto is None else auto.stage
            return f"no plan yet ({stage}): the first steps are measured, and keep as little as they can"
        return f"{plan_heading(auto.plan)}\n\n{plan_table(auto.plan)}"

    def close(self) -> None:
        """Give the model its own forward back, and the optimizer its step and state; release host memory. Idempotent.

        Call it on every rank, after the last backward: a backward over offloaded tensors raises an error. Training may
        go on without swapping. Offloaded optimizer state is reloaded. State that the device has no room for stays in
        host memory: a checkpoint can be saved, but the optimizer can no longer step.

        Raises:
            DiskError: a write failed, so the state on disk is incomplete. All else is restored and released.
            RuntimeError: a copy on the GPU has failed. All else is restored and released.
            OSError: the plan cannot be written.
        """
        self._end(has_failed=False)

    def __enter__(self) -> Self:
        if self._last is not None:  # else a second ``with`` would train without swapping
            raise UsageError("this run of swap is closed: call the function that made it again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(has_failed=error is not None)

    def _end(self, *, has_failed: bool) -> None:
        if self._last is not None:
            return
        before = self._figures()  # with the optimizer state that is offloaded still
        with ExitStack() as whatever_fails:
            whatever_fails.callback(self._forget_model)
            if not has_failed and self.steps.number:
                whatever_fails.callback(self.finish)
            whatever_fails.callback(self.release, before)
            if self._profiler is not None:
                (self._profiler.abandon if has_failed else self._profiler.close)()
            if self.optimizer_swap is not None:
                try:
                    self.optimizer_swap.set_offload_fraction(0.0)
                except torch.OutOfMemoryError:
                    self._console.say(
                        "the device has no room for the offloaded optimizer state: it stays in host memory"
                    )

    def _forget_model(self) -> None:
        """Hold neither the model nor its layers: users keep a run for its figures."""
        self._plan = self.plan()
        self.auto = self.weights = None
        self.hints.forget_model()

    def finish(self) -> None:
        """Write the plan, if the settings ask for it, and tell how it compares with the run."""
        if self.planned.plan_run is not None:
            self._console.say_here(self.planned.plan_run.save())
        if self.auto is not None:
            self.auto.finish()

    def abandon(self) -> None:
        """Uninstall everything after a failure."""
        # Nothing is collective: other ranks may be anywhere. No copy is waited for: the device may be broken.
        if self._profiler is not None:
            self._profiler.abandon()
        self._uninstall()
        if self.parts is not None:
            self.parts.machine.guard.end()

    def release(self, before: Stats | None = None) -> None:
        """Uninstall everything and release all memory, without a word. Idempotent.

        ``before`` are the figures from before optimizer state was given back; by default those of now.

        Raises:
            DiskError: a write failed, so the state on disk is incomplete. All else is uninstalled and released.
        """
        if self._last is not None:
            return
        parts, swap = self.parts, self.optimizer_swap
        before = self._last = before or self._figures()
        self.optimizer_swap = None
        with ExitStack() as last_first:  # runs every step even if one fails: a disk may fail now
            last_first.callback(setattr, self, "parts", None)
            if self.weights is not None:  # below the boundaries
                last_first.callback(self.weights.close)
            if self.planned.disk is not None:
                last_first.callback(self.planned.disk.close)
            if parts is not None:
                last_first.callback(parts.machine.tier.close)
                last_first.callback(self._note_waits, before)
                last_first.callback(parts.manager.drain)  # afterwards every wait is measured
                last_first.callback(parts.engine.saved_tensors.checks.read)
            elif self.run_device.is_made:
                last_first.callback(self.run_device.device.close)
            last_first.callback(self._uninstall)
            if swap is not None:
                last_first.callback(swap.close)

    def _note_waits(self, before: Stats) -> None:
        """Take the figures anew, but those of optimizer state, which is given back."""
        self._last = replace(self._figures(), state_bytes=before.state_bytes, host_bytes=before.host_bytes)

    def _uninstall(self) -> None:
        with ExitStack() as first_last:
            if self.parts is not None:
                first_last.callback(self.hints.unbound)
                first_last.callback(self.parts.layers.remove)
            for undo in self._undo:
                first_last.callback(undo)
            self._undo.clear()
            if self.parts is not None:
                first_last.callback(self.parts.recorder.abandon)
            if self.auto is not None:
                first_last.callback(self.auto.close)
            if self.optimizer_swap is not None:
                first_last.callback(self.optimizer_swap.abandon)


def unknown_model() -> UsageError:
    """Return the error of a run whose model was not attached."""
    return UsageError(
        "SwapSession.install does not know the model that trains: pass it the model_config of that model, or "
        "pass the model's chunks to attach before they are wrapped for data parallelism."
    )


def learn_order(layers: LearnedLayers, model: nn.Module, auto: AutoPlan, window_bytes: int | None) -> list[str]:
    """Number the runs of layers, once backward has entered some, equally on all ranks.

    Return lines on the layers without a number, which are kept. Raises a ``UsageError`` if the ranks have run different
    layers, or in another order, or if autograd calls no hooks in any.
    """
    names = {module: name for name, module in model.named_modules()}
    first, *others = auto.ranks.gather(lambda: [names.get(module, "") for module in layers.seen_order()])
    for rank, other in enumerate(others, 1):
        for number, (one, another) in enumerate(zip_longest(first, other)):
            if one != another:
                raise UsageError(
                    f"the ranks run different layers: run {number} of the longest forward is of {one or 'none'} on "
                    f"rank 0, and of {another or 'none'} on rank {rank}. One plan is for all ranks: let every "
                    "rank run the same layers, or swap layers without a budget."
                )
    if not first:
        if layers.have_run_unhooked:
            raise UsageError(
                "the layers run where PyTorch calls no saved-tensor hooks (inside torch.func.grad, vjp or jacrev, "
                "or torch.autograd.graph.disable_saved_tensors_hooks), so nothing that they save can be planned. "
                "Take gradients by backward() or torch.autograd.grad, or train without memory_gib."
            )
        return []
    idle, elsewhere = layers.learn_order(window_bytes)
    kept = (idle, "no backward has entered"), (elsewhere, "the longest forward does not run")
    return [
        f"{why} {', '.join(names.get(layer, '') for layer in those)}: what these layers save is kept"
        for those, why in kept if those
    ]  # fmt: skip
