"""Swapping for a Megatron model that exists already, in anybody's training loop: without flags, without globals."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from megatron.swap.autotune.training_steps import TrainingSteps
from megatron.swap.common.counters import Totals
from megatron.swap.common.plan import check_model
from megatron.swap.common.settings import Settings
from megatron.swap.common.spelling import INSTALL
from megatron.swap.common.types import GIB, UsageError, format_bytes
from megatron.swap.engine.overrides import NotCopied, in_backward
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.built_model import (
    blocks_of,
    check_optimizer,
    facts_of,
    unwrapped,
    with_batch,
)
from megatron.swap.megatron_lm.checks import check_settings
from megatron.swap.megatron_lm.layer import has_own_checkpointed_forward
from megatron.swap.megatron_lm.memory_needs import MemoryCheck
from megatron.swap.native.guarding import build_guard
from megatron.swap.patches import linear_weight_gradients
from megatron.swap.run.console import LogConsole
from megatron.swap.run.model_swap import ModelSwap
from megatron.swap.run.shared_patches import SHARED


@INSTALL.errors()
def install(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Any = None,
    *,
    memory_gib: float | None = None,
    layers: str | Iterable[int] | None = None,
    plan: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> BuiltSwap:
    """Swap what the layers of a Megatron model save, from the next step on.

    ::

        swapped = swap.install(model, optimizer, memory_gib=60)
        ...                      # the training loop that you have
        print(swapped.stats())
        swapped.close()

    Losses, gradients and weights are bit-equal to a run without swapping. Call it on every rank, before training or
    between two steps, when the model is on its device.

    Args:
        model: this rank's model chunk, or its chunks in the order of the virtual pipeline stages; in Megatron's
            wrappers or without them.
        optimizer: Megatron's or torch's. Its ``step`` ends a training step; where a gradient scaler may skip that, call
            ``BuiltSwap.step``. ``None``: a step ends at the first forward after an optimizer of the model's parameters
            has stepped, or where ``BuiltSwap.step`` is called.
        memory_gib: most device memory that a step may take: the first steps are measured, then the planner decides.
        layers: layers to swap: ``0-9``, ``0,4-7``, ``every:2``, ``all``, or their numbers.
        plan: a plan file.
        config: more of the ``--swap-`` flags, without that prefix and with underscores: ``{"min_mib": 0.1}``. With
            ``optimizer``, ``{"optimizer": 0.5}`` offloads half of its state.

    While optimizer state is offloaded, main parameters and moments may be read through the optimizer's ``state_dict``
    alone. A planner's ``Infeasible`` comes out of the call that ends a step: the optimizer's ``step``, or ``step``.

    Raises:
        UsageError: the arguments cannot work for this model; nothing was changed.
        HostMemoryError: the host has less memory than is needed at least.
        PatchError: this Megatron lacks what the settings need.
    """
    settings = _settings({"memory_gib": memory_gib, "layers": layers, "plan": plan}, config)
    chunks, is_data_parallel = unwrapped(model)
    check_optimizer(optimizer, chunks)
    _check_free(chunks, optimizer)
    facts = facts_of(chunks, optimizer)
    if settings.plan is not None:  # the model's batches are not known yet: compared in the first step
        of_plan = settings.plan.model
        facts = replace(facts, seq_length=of_plan.seq_length, micro_batch_size=of_plan.micro_batch_size)
    check_settings(facts, settings)
    if not settings.attaches:
        raise UsageError("install: nothing is to be swapped. Give memory_gib, layers or plan.")
    if settings.optimizer and optimizer is None:
        raise UsageError(f"optimizer {settings.optimizer}: there is no optimizer. Pass Megatron's to install.")
    if settings.oom_guard:
        build_guard(on_gpu=torch.cuda.is_available())
    swapped = BuiltSwap(facts, settings)
    try:
        swapped._begin(chunks, is_data_parallel=is_data_parallel, optimizer=optimizer)
    except BaseException:
        swapped.close()
        raise
    return swapped


def _settings(given: Mapping[str, Any], config: Mapping[str, Any] | None) -> Settings:
    """Return all settings, those of ``config`` included.

    Raises:
        UsageError: ``config`` is no mapping, or repeats an argument.
    """
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        raise UsageError(f"config {config!r}: must be a mapping of settings, such as {{'min_mib': 0.1}}.")
    for name, value in given.items():
        if value is not None and name in config:
            raise UsageError(f"{name} is given twice: as an argument and in config. Leave one out.")
    return Settings.of({**given, **config})


def _check_free(chunks: Sequence[nn.Module], optimizer: Any) -> None:
    """Refuse a model or an optimizer that another ``install`` has not given back."""
    for other in SHARED.models:
        if isinstance(other, BuiltSwap) and other.uses(chunks, optimizer):
            raise UsageError("install: this model or its optimizer swaps already. Call close() of that install first.")


@dataclass(frozen=True)
class BuiltStats:
    """Figures of this rank.

    Attributes:
        num_steps: steps that have ended.
        stage: ``profile``, ``search`` or ``stable`` while a planner decides; ``None``: none does.
        budget_gib: the planner's budget; ``None``: none.
        predicted_gib, predicted_ms: peak and step time of the present plan, predicted; ``None``: there is no plan.
        peak_gib, step_ms: those of the last step, measured; ``None``: no planner measures them.
        out_bytes, in_bytes: copied to host memory, and back, since the start.
        num_late: storages whose reload began only with their layer's backward. 0, but in steps that a planner measures,
            and where the prefetch window is smaller than what a layer offloads.
        wait_ms: time that compute waited for copies, as far as the device has run.
        state_bytes: optimizer state that is offloaded now.
        host_bytes: host memory that is reserved, with optimizer state.
        num_rescues: failed allocations that succeeded after an eviction.
    """

    num_steps: int
    stage: str | None
    budget_gib: float | None
    predicted_gib: float | None
    predicted_ms: float | None
    peak_gib: float | None
    step_ms: float | None
    out_bytes: int
    in_bytes: int
    num_late: int
    wait_ms: float
    state_bytes: int
    host_bytes: int
    num_rescues: int

    def __str__(self) -> str:
        steps = "step" if self.num_steps == 1 else "steps"
        text = (
            f"{self.num_steps} {steps}: {format_bytes(self.out_bytes)} out, {format_bytes(self.in_bytes)} in, "
            f"{self.num_late} late, {self.wait_ms:.1f} ms waited, {format_bytes(self.host_bytes)} of host memory"
        )
        if self.state_bytes:
            text += f", {format_bytes(self.state_bytes)} of optimizer state offloaded"
        if self.budget_gib is not None:
            text += f"; {self.stage} within {self.budget_gib:g} GiB"
        if self.peak_gib is not None:
            text += f", last step {format_bytes(self.peak_gib * GIB)}"
        return text


class BuiltSwap(ModelSwap, NotCopied):
    """A model whose layers swap, until ``close`` or the end of its ``with``. Made by ``install``."""

    def __init__(self, facts: MegatronFacts, settings: Settings) -> None:
        self._steps = TrainingSteps(self._end_step)
        num_micro_batches = lambda: self._steps.num_micro_batches  # noqa: E731
        console = LogConsole(settings.log_level, facts.rank, facts.world_size)
        super().__init__(facts, settings, MemoryCheck(None, None), num_micro_batches, console, has_verdict=False)
        self._last: BuiltStats | None = None
        self._chunks: list[nn.Module] = []
        self._optimizer: Any = None

    def _observed(self, chunk: nn.Module) -> Callable[..., Any]:
        return INSTALL.errors()(super()._observed(chunk))

    def uses(self, chunks: Sequence[nn.Module], optimizer: Any) -> bool:
        """Return whether one of ``chunks`` swaps by this install, or it offloads the state of ``optimizer``."""
        offloads = self.optimizer_swap is not None and optimizer is not None and optimizer is self._optimizer
        return offloads or any(chunk is mine for chunk in chunks for mine in self._chunks)

    def _begin(self, chunks: list[nn.Module], *, is_data_parallel: bool, optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._undo += map(self._refuse_copies_of, chunks)
        own = [has_own_checkpointed_forward(block) for chunk in chunks for block in blocks_of(chunk)]
        applied = SHARED.add(self, self.facts, self.settings, self.planned.kinds, patches_full=not all(own))
        self._undo.append(functools.partial(SHARED.remove, self))
        self._say_lost(applied)
        self._lacks_fusion = any(misfit.patch is linear_weight_gradients.PATCH for misfit in applied.left_out)
        if is_data_parallel:  # it holds the nodes that accumulate gradients already
            self._attach(chunks)
        else:
            self.attach(chunks)
        if self.settings.offload_fraction:
            self._attached_optimizer_swap().take_over(optimizer)
            self._reserve_host_memory()
        # Before all other hooks: the step that is over must have ended when they see the next one.
        hook = chunks[0].register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True)
        self._undo.append(hook.remove)
        self._undo.append(self._follow(optimizer))

    # --------------------------------------------------------------------- steps

    def _follow(self, optimizer: Any) -> Callable[[], None]:
        """Learn of each step of ``optimizer``, or of any in this process. Return a function that ends that."""
        if optimizer is None:
            return self._steps.watch_optimizers(self._chunks)
        if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer):
            return optimizer.register_step_post_hook(self._optimizer_stepped).remove
        return _after(optimizer, "step", self._optimizer_stepped)

    def _optimizer_stepped(self, *_: object) -> None:
        self._steps.optimizer_stepped()

    def _forward_begins(self, chunk: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if in_backward():
            return
        if not torch.is_grad_enabled():
            self._steps.evaluation_begins()
            return
        self._steps.forward_begins()
        if self._steps.number == 0 and self._steps.num_forwards == 1:
            self.facts = with_batch(self.facts, arguments, options)
            if (plan := self.settings.plan) is not None:
                check_model(plan, self.describe(), f"plan {plan.file}")

    def around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        """Return the context for the forward of ``block``, which may be another model's, with full recomputation."""
        return nullcontext() if self.parts is None else super().around_checkpointed_forward(block)

    def step(self) -> None:
        """Tell that a training step has ended: after the optimizer's step, before the next forward, on every rank.

        From the first call on, steps of optimizers are not watched any more. A call without a forward since the last
        end of a step does nothing.

        Raises:
            Infeasible: the planner found no plan that fits the budget.
        """
        self._steps.tell()

    @INSTALL.errors()
    def _end_step(self, number: int) -> None:
        if self._last is None:
            self.step_ended(number, {}, None)

    # ------------------------------------------------------------------- figures

    def stats(self) -> BuiltStats:
        """Return the figures until now, or until ``close``. Never waits for the device."""
        return self._last or self._stats()

    def _stats(self) -> BuiltStats:
        auto, target = self.auto, self.planned.target
        last, plan = (None, None) if auto is None else (auto.last_step, auto.plan)
        predicted = None if plan is None else plan.predicted
        host_bytes = 0 if self.parts is None else self.parts.machine.pool.stats.reserved_bytes
        state_bytes = 0
        if self.optimizer_swap is not None:
            host_bytes += self.optimizer_swap.reserved_bytes
            state_bytes = sum(one.num_bytes for one in self.optimizer_swap.offloaded_tensors())
        totals = Totals() if self.parts is None else self.parts.manager.counters.totals()
        return BuiltStats(
            num_steps=self._steps.number,
            stage=None if auto is None else auto.stage,
            budget_gib=None if target is None else target.budget_gib,
            predicted_gib=None if predicted is None else predicted.peak_gib,
            predicted_ms=None if predicted is None else predicted.step_ms,
            peak_gib=None if last is None else last.peak_gib,
            step_ms=None if last is None else last.ms,
            out_bytes=totals.out_bytes,
            in_bytes=totals.in_bytes,
            num_late=totals.num_late,
            wait_ms=totals.wait_ms,
            state_bytes=state_bytes,
            host_bytes=host_bytes,
            num_rescues=sum(step.num_rescues for step in self.step_log.records),
        )

    # ----------------------------------------------------------------------- end

    def close(self) -> None:
        """Give the model back its own forward and the optimizer its own step and state. Idempotent.

        Call it on every rank, when no graph of the model is outstanding. Training may go on without swapping. Offloaded
        optimizer state is reloaded. Where the device has no room for it, it stays in host memory: a checkpoint can be
        saved, but the optimizer can no longer step.

        Raises:
            DiskError: a write failed, so the state on disk is incomplete. All else is restored and released.
            OSError: the plan cannot be written.
        """
        if self._last is not None:
            return
        with ExitStack() as whatever_fails:
            whatever_fails.callback(super().close)
            self._last = self._stats()
            if self._profiler is not None:
                self._profiler.close()
            self._reload_state()
        if self._steps.number and self.planned.plan_run is not None:
            self._console.say_here(self.planned.plan_run.save())
        if self._steps.number and self.auto is not None:
            self.auto.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._last is None:
            with ExitStack() as whatever_fails:
                whatever_fails.callback(super().close)
                self._last = self._stats()
                if self._profiler is not None:
                    self._profiler.abandon()
                self._reload_state()
        self.close()

    def _reload_state(self) -> None:
        if self.optimizer_swap is None:
            return
        try:
            self.optimizer_swap.set_offload_fraction(0.0)
        except torch.OutOfMemoryError:
            self._console.say("the device has no room for the offloaded optimizer state: it stays in host memory")


def _after(owner: Any, name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Call ``call`` after each call of the method ``name`` of ``owner``. Return a function that restores the method."""
    own, method, is_on = vars(owner).get(name), getattr(owner, name), True

    @functools.wraps(method)
    def called(*arguments: Any, **options: Any) -> Any:
        result = method(*arguments, **options)
        if is_on:
            call()
        return result

    setattr(owner, name, called)

    def restore() -> None:
        nonlocal is_on
        is_on = False
        if vars(owner).get(name) is not called:
            return  # somebody has wrapped it since
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)

    return restore
