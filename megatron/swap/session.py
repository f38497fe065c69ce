"""The composition root: builds the parts from the settings, puts them into Megatron, takes them out at the end."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.swap import accumulators, cross_entropy, ledger
from megatron.swap.arguments import device_memory_gib, recompute_kinds, swap_config
from megatron.swap.auto import AutoPlan
from megatron.swap.autograd import SavedTensors, put_forward
from megatron.swap.config import SwapConfig
from megatron.swap.devices.base import Device
from megatron.swap.devices.cuda import CudaDevice, expands_segments
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.disk_file import DiskFile
from megatron.swap.guard import OomGuard
from megatron.swap.host_pool import HostPool
from megatron.swap.host_share import host_share
from megatron.swap.layer import Boundaries, num_micro_batches, pipeline_rank
from megatron.swap.manager import SwapManager
from megatron.swap.native.guarding import build_guard
from megatron.swap.observer import Observer
from megatron.swap.optimizer import OptimizerSwap, expected_state, unchained
from megatron.swap.plan_run import PlanRun
from megatron.swap.planner.flags import model_of
from megatron.swap.planner.profile import Resting
from megatron.swap.policy import policy_of
from megatron.swap.producers import Producers, tell_copy, tell_norm_of_linear
from megatron.swap.profiler import Profiler
from megatron.swap.ranks import gather, is_last_rank
from megatron.swap.recipes import Recipes
from megatron.swap.recorder import Recorder
from megatron.swap.summary import (
    RankReport,
    StepRecord,
    build_summary,
    device_line,
    idle_line,
    layer_table,
    memory_lines,
    refused_lines,
    rescue_lines,
    scalars,
    start_table,
    step_line,
    write_json,
)
from megatron.swap.tiers.base import Tier
from megatron.swap.tiers.host import HostTier
from megatron.swap.tiers.spill import spill_tier
from megatron.swap.trace import Ranges, Totals
from megatron.swap.types import ACTIVATION, MIB, NORM, ROTARY, MemoryRow, UsageError
from patches import (
    checkpointed_forward,
    fused_activations,
    get_megatron_optimizer,
    linear_weight_gradients,
    main_params,
    recompile_limit,
    registry,
    rotary,
    te_normalization,
    te_qkv_layout,
    train,
    training_log,
)
from patches.cross_entropy import cross_entropy_patch
from patches.registry import AppliedPatches


class SwapSession:
    """One training run. ``install`` is all that a training script calls; the rest is called by Megatron."""

    def __init__(self, args: Namespace, config: SwapConfig) -> None:
        self.config = config
        self._args = args
        self._kinds = recompute_kinds(args, config)
        self._auto: AutoPlan | None = None
        if config.auto:
            memory_gib = device_memory_gib(args)
            self._auto = AutoPlan(config, model_of(args), memory_gib, self._kinds, self._say, self._tell)
        self._policy = self._auto.policy if self._auto is not None else policy_of(config)
        self._swaps = any(map(self._policy.swaps_layer, range(args.num_layers)))
        wants_plan = config.plan is not None or (config.save_plan is not None and not config.auto)
        self._plan_run = PlanRun(config, model_of(args)) if wants_plan else None
        counts = config.summary is not None or (config.auto and not torch.cuda.is_available())
        self._observer = Observer() if counts else None
        self._host = host_share(config, args, self._swaps)
        self._disk = DiskFile(config.disk_dir, self._host.disk_bytes) if config.disk_dir is not None else None
        self._device: Device | None = None
        self._tier: Tier | None = None
        self._manager: SwapManager | None = None
        self._boundaries: Boundaries | None = None
        self._recipes: Recipes | None = None
        self._recorder: Recorder | None = None
        self._pool: HostPool | None = None
        self._optimizer: OptimizerSwap | None = None
        self._is_attached = False
        self._num_told = 0
        self._accumulators: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._patches: AppliedPatches | None = None
        self._pre_wrap_hooks: list[Any] = []
        self._steps: list[StepRecord] = []
        self._totals = Totals()
        self._ranges = Ranges()
        self._profiler = self._make_profiler() if config.profile is not None else None

    # ------------------------------------------------------------------ set-up

    @classmethod
    def install(cls, args: Namespace, model_config: Any = None) -> SwapSession:
        """Prepare a training run for swapping.

        Args:
            args: Megatron's parsed arguments, with those of ``add_swap_args``.
            model_config: Megatron's model config (``gpt_config_from_args``), which tells us of the built model. A
                script without one hands its model chunks to ``attach`` before they are wrapped.

        Raises:
            UsageError: the settings cannot work; nothing was changed.
            HostMemoryError: the host has less memory than the run needs at least.
            PatchError: this Megatron is not the one that our patches were written for.
        """
        config = swap_config(args)
        if config.oom_guard:
            build_guard(on_gpu=torch.cuda.is_available())
        session = cls(args, config)
        if not config.does_anything:
            return session
        patches = [train.train_patch(session._on_begin, session._on_finish)]
        patches.append(training_log.training_log_patch(session._on_iteration))
        if config.acts:
            patches.append(recompile_limit.PATCH)
        if config.acts or config.optimizer:
            patches.append(cross_entropy_patch(cross_entropy.in_parts))
            patches += main_params.main_params_patches(session._main_param_is_born if config.optimizer else None)
        if config.optimizer:
            patches.append(get_megatron_optimizer.get_megatron_optimizer_patch(session._optimizer_is_built))
        if args.gradient_accumulation_fusion:
            patches.append(linear_weight_gradients.PATCH)
        with_te = args.transformer_impl == "transformer_engine"
        if ACTIVATION in session._kinds:
            patches += fused_activations.fused_activations_patches(functools.partial(session._watched, ACTIVATION))
        if NORM in session._kinds and with_te:
            tell = functools.partial(session._told, tell_norm_of_linear)
            patches.append(te_normalization.te_normalization_patch(tell))
        if ROTARY in session._kinds:
            patches.append(rotary.rotary_patch(functools.partial(session._watched, ROTARY)))
        if ROTARY in session._kinds and with_te:
            patches.append(te_qkv_layout.te_qkv_layout_patch(functools.partial(session._told, tell_copy)))
        if config.acts and args.recompute_granularity == "full":
            patches.append(checkpointed_forward.checkpointed_forward_patch(session._around_checkpointed_forward))
        try:
            session._patches = registry.apply(patches)
        except BaseException:
            session.close()
            raise
        if model_config is not None:
            session._pre_wrap_hooks = model_config.pre_wrap_hooks
            session._pre_wrap_hooks.append(session.attach)
        return session

    def attach(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Put the boundaries around the layers of this rank's model chunks; they are returned as they came."""
        self._is_attached = True
        self._device_of_rank()
        for chunk in chunks:
            if self.config.acts or self._observer is not None:
                self._surround(chunk)
            if self.config.acts or self.config.optimizer:
                self._accumulators += accumulators.made_here(chunk)
            if self.config.optimizer:
                self._optimizer_swap().watch(chunk)
        if self.config.acts:
            if self._manager is None:
                self._build()
            assert self._boundaries is not None
            assert self._recorder is not None
            for chunk in chunks:
                self._undo.append(self._recorder.watch(chunk))
                self._boundaries.install(
                    chunk, self.config.modules, ends_in_loss=bool(getattr(chunk, "post_process", True))
                )
                if self._auto is not None:
                    self._auto.watch(chunk)
        return chunks

    def _surround(self, chunk: nn.Module) -> None:
        """Count everything that autograd saves in this chunk; record what it saves outside its layers."""
        inner = chunk.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                if self._observer is not None:
                    stack.enter_context(self._observer.context(chunk))
                if self._boundaries is not None:
                    stack.enter_context(self._boundaries.around_layers(chunk))
                return inner(*args, **kwargs)

        self._undo.append(put_forward(chunk, forward))

    def _device_of_rank(self) -> Device:
        # Not before now: the device of this rank is chosen, and CUDA started, when Megatron initializes.
        if self._device is None:
            delay_s, on_gpu = self.config.cpu_delay_ms / 1e3, torch.cuda.is_available()
            rank, memory_gib = self._args.rank, self.config.cpu_memory_gib
            self._device = CudaDevice() if on_gpu else EmulatedDevice(delay_s, rank, self._ranges, memory_gib)
        return self._device

    def _optimizer_swap(self) -> OptimizerSwap:
        if self._optimizer is None:
            min_bytes = int(self.config.min_mib * MIB)
            self._optimizer = OptimizerSwap(
                self.config.optimizer, self._device_of_rank(), self._host.optimizer_bytes, min_bytes, self._disk,
                expected_state(self._args) if self.config.optimizer_auto else None,
            )  # fmt: skip
        return self._optimizer

    def _main_param_is_born(self, param: torch.Tensor) -> None:
        self._optimizer_swap().born(param)

    def _optimizer_is_built(self, optimizer: Any) -> None:
        swap = self._optimizer_swap()
        swap.attach(optimizer)
        if self._pool is not None:
            self._pool.limit_bytes -= swap.booked_bytes
            self._pool.book(min(self._host.least_bytes, self._pool.limit_bytes))
        self._say(swap.told())

    def _build(self) -> None:
        config, on_gpu = self.config, torch.cuda.is_available()
        self._device = self._device_of_rank()
        self._pool = pool = HostPool(limit_bytes=self._host.limit_bytes, pinned=on_gpu)
        self._tier = host = HostTier(pool)
        if self._disk is not None and self._swaps:
            self._tier = spill_tier(host, self._disk)
        if not config.optimizer:  # else it comes first: its size is known, and it does not grow
            pool.book(min(self._host.least_bytes, pool.limit_bytes))
        guard = OomGuard(self._device, pool, int(config.min_mib * MIB), self._host.guard_bytes)
        self._manager = SwapManager(
            self._device, self._tier, self._policy.without_recipe, config.window_bytes(config.plan), config.verify,
            self._ranges, guard, None if self._auto is None else self._auto.tier_is_full,
        )  # fmt: skip
        if config.oom_guard:
            guard.begin()
        producers = None
        if self._kinds:
            self._recipes = Recipes(
                self._device, self._policy.action, self._manager.counters, self._ranges, config.verify
            )
            producers = Producers(self._recipes, self._kinds)
        self._recorder = Recorder(self._device, self._ranges, self._take_peak, from_use=not on_gpu)
        on_saved = None if self._plan_run is None else self._plan_run.note
        saved_tensors = SavedTensors(
            self._manager, self._device.torch_device, self._observer, self._recipes, self._recorder, on_saved
        )
        self._boundaries = Boundaries(self._manager, saved_tensors, self._policy, producers)
        if self._auto is not None:
            self._auto.begin(
                self._boundaries, self._device, host, self._recorder, saved_tensors.footprint,
                pipeline_rank(), num_micro_batches, lambda: pool.limit_bytes, self._take_peak, self._resting,
                lambda part: self._optimizer_swap().let_rest(part), None if config.oom_guard else guard,
            )  # fmt: skip
        if config.log_level != "quiet" and self._args.rank == 0:
            limits = self._host.limit_bytes, self._host.guard_bytes
            print(start_table(config, self._args.num_layers, self._tier.stats().booked_bytes, *limits), flush=True)

    def _make_profiler(self) -> Profiler:
        assert self.config.profile is not None
        steps, rank = self.config.profile_steps, self._args.rank
        return Profiler(self.config.profile, *steps, rank, self._ranges, self._allocated_bytes)

    def _allocated_bytes(self) -> int | None:
        """Device memory in use; where RAM plays the device, what autograd holds of it, if that is counted."""
        num_bytes = self._device.allocated_bytes() if self._device is not None else None
        if num_bytes is None and self._observer is not None:
            return self._observer.live_bytes
        return num_bytes

    def _take_peak(self) -> tuple[int, int]:
        """Most device memory in use since the last call, and in use now; what RAM plays, as above."""
        peak = self._device.take_peak() if self._device is not None else None
        if peak is None and self._observer is not None:
            peak = self._observer.take_peak()
            if self.config.optimizer_auto:  # of what is not autograd's it is the planner's to decide
                staying_bytes = self._optimizer_swap().staying_bytes
                peak = peak[0] + staying_bytes, peak[1] + staying_bytes
        return peak or (0, 0)

    def _resting(self) -> Resting | None:
        return self._optimizer_swap().resting() if self.config.optimizer_auto else None

    def _around_checkpointed_forward(self, block: nn.Module) -> AbstractContextManager[None]:
        assert self._boundaries is not None
        return self._boundaries.around_checkpointed_forward(block)

    def _watched(self, producer: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function as Megatron finds it from now on; there are no recipes before the model is."""

        @functools.wraps(function)
        def tells(*arguments: Any, **options: Any) -> Any:
            output = function(*arguments, **options)
            if self._recipes is not None and torch.is_grad_enabled():
                self._recipes.tell(producer, function, arguments, options, output)
            return output

        return tells

    def _told(self, tell: Callable[..., None], *what: Any) -> None:
        if self._recipes is not None:
            tell(self._recipes, *what)

    # ---------------------------------------------------------------- training

    def _on_begin(self) -> None:
        if not self._is_attached and (self.config.acts or self.config.optimizer or self._observer is not None):
            raise UsageError(
                "SwapSession.install does not know the model that trains: pass it the model_config of that model, or "
                "hand its chunks to attach before they are wrapped for data parallelism."
            )

    def _on_iteration(
        self, iteration: int, losses: dict[str, torch.Tensor], grad_norm: Any, is_logged: bool, writer: Any
    ) -> None:
        step = self._take_step(iteration, losses, grad_norm)
        self._steps.append(step)
        if self._profiler is not None:
            self._profiler.step_ended(iteration)
        if self._recorder is not None:
            self._recorder.step_ended(iteration + 1)
        if self._auto is not None:
            self._auto.step_ended(iteration, step.short_bytes, step.num_alloc_retries)
        if self._optimizer is not None:
            auto = self._auto
            self._optimizer.step_ended(auto is None or not auto.is_measuring, auto is None or not auto.has_switched)
        if self._plan_run is not None:
            self._tell(self._plan_run.step_ended())
        self._tell_refused()
        if self._manager is None or not is_logged:
            return
        assert self._device is not None
        peak_bytes = self._device.peak_bytes()
        if self.config.log_level != "quiet" and is_last_rank():
            print(step_line(step, peak_bytes, self._args.rank if self._args.world_size > 1 else None), flush=True)
        if writer is not None:
            for name, value in scalars(step, peak_bytes).items():
                writer.add_scalar(name, value, iteration)

    def _tell_refused(self) -> None:
        """Say what should be recomputed and is not, once."""
        if self._recipes is None:
            return
        refused = list(self._recipes.refused.items())
        lines = refused_lines(refused[self._num_told :])
        if len(self._steps) == 1:
            lines += [idle_line(kind) for kind in self.config.recompute if not self._recipes.spared_bytes[kind]]
        self._num_told = len(refused)
        self._tell(lines)

    def _say(self, line: str) -> None:
        """What is the same on all ranks."""
        if self.config.log_level != "quiet" and self._args.rank == 0:
            print(f" swap: {line}", flush=True)

    def _tell(self, lines: Sequence[str]) -> None:
        whose = f" (rank {self._args.rank})" if self._args.world_size > 1 else ""
        for line in lines if self.config.log_level != "quiet" else ():
            print(f" swap{whose}: {line}", flush=True)

    def _take_step(self, iteration: int, losses: dict[str, torch.Tensor], grad_norm: Any) -> StepRecord:
        totals = self._manager.counters.totals() if self._manager is not None else Totals()
        moved, self._totals = totals.since(self._totals), totals
        rescues = self._manager.guard.take_rescues() if self._manager is not None else []
        self._tell(rescue_lines(rescues))
        # Read at the end: a number now would make the host wait for the device.
        loss = next(iter(losses.values()), None) if self.config.summary is not None else None
        return StepRecord(
            iteration=iteration,
            moved=moved,
            loss=None if loss is None else loss.detach().clone(),
            grad_norm=None if grad_norm is None else float(grad_norm),
            num_rescues=len(rescues),
            rescued_bytes=sum(rescue.freed_bytes for rescue in rescues),
            short_bytes=max((rescue.short_bytes for rescue in rescues), default=0),
            num_alloc_retries=self._device_of_rank().take_retries(),
        )

    def _on_finish(self, failure: BaseException | None, chunks: Sequence[nn.Module], optimizer: Any) -> None:
        if failure is not None and not (isinstance(failure, SystemExit) and failure.code in (None, 0)):
            # Other ranks may be anywhere and the device may be broken: no collective, no waiting for copies, and no
            # summary that would look like a success. The failure itself goes on to the user.
            if self._profiler is not None:
                self._profiler.abandon()
            if isinstance(failure, torch.OutOfMemoryError):
                self._tell(memory_lines(self._memory(self._report(), chunks, optimizer)))
            self._uninstall()
            return
        if self._profiler is not None:
            self._profiler.close()
        report = self._report()
        if self.config.summary is not None:
            report.memory = self._memory(report, chunks, optimizer)
        self.close()
        if self._plan_run is not None:
            self._plan_run.save()
        if self._auto is not None:
            self._auto.finish()
        reports = gather(report)
        if reports is None:
            return
        planning = self._auto.summary() if self._auto is not None else None
        summary = build_summary(self._args.num_layers, reports, planning)
        if self.config.summary is not None:
            try:
                write_json(self.config.summary, summary)
            except OSError as error:  # Megatron's last checkpoint is still to come: it matters more than our report
                print(f" swap: --swap-summary was not written: {error}", file=sys.stderr, flush=True)
        if (self._swaps or self.config.oom_guard) and self.config.log_level != "quiet":
            print(layer_table(summary, self._swaps), flush=True)
            if (line := device_line(summary, expands_segments())) is not None:
                print(line, flush=True)

    def _memory(self, report: RankReport, chunks: Sequence[nn.Module], optimizer: Any) -> list[MemoryRow]:
        homes = self._optimizer.homes() if self._optimizer is not None else ()
        inner = [one.optimizer for one in unchained(optimizer)]
        return ledger.measure(report, self._device_of_rank(), chunks, inner, homes)

    def _report(self) -> RankReport:
        report = RankReport(
            steps=[replace(step, loss=None if step.loss is None else float(step.loss)) for step in self._steps],
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            device_peak_bytes=self._device_of_rank().peak_bytes(),  # a recorder resets torch's own
            saved_peak_bytes=None if self._observer is None else self._observer.peak_bytes,
            host_booked_bytes=0, host_leased_peak_bytes=0, stayed_bytes=0,
            device_reserved_bytes=self._device_of_rank().peak_reserved_bytes(),
        )
        if self._optimizer is not None:
            self._optimizer.report_to(report)
        if self._manager is not None and self._tier is not None:
            stats, counters = self._tier.stats(), self._manager.counters
            report.host_booked_bytes = stats.booked_bytes
            report.host_leased_peak_bytes = stats.leased_peak_bytes
            report.disk_booked_bytes = stats.disk_booked_bytes
            report.disk_leased_peak_bytes = stats.disk_peak_bytes
            report.stayed_bytes = sum(layer.stayed_bytes for layer in counters.layers.values())
            if self._recipes is not None:
                report.recompute_refused = [f"{site}: {reason}" for site, reason in self._recipes.refused.items()]
            report.swapped_layers = sorted(number for number, layer in counters.layers.items() if layer.out_bytes)
        return report

    def close(self) -> None:
        """Take everything out of Megatron and give the memory back. Again: nothing happens.

        The end of training does it. A script calls it where training was installed and never began.
        """
        optimizer, self._optimizer = self._optimizer, None
        manager, self._manager = self._manager, None
        disk, self._disk = self._disk, None
        with ExitStack() as last_first:  # whatever becomes of each: a disk may fail now
            if disk is not None:
                last_first.callback(disk.close)
            if manager is not None and self._tier is not None:
                last_first.callback(self._tier.close)
                last_first.callback(manager.drain)
            elif self._device is not None:
                last_first.callback(self._device.close)
            last_first.callback(self._uninstall)
            if optimizer is not None:
                last_first.callback(optimizer.close)

    def _uninstall(self) -> None:
        if self._optimizer is not None:
            self._optimizer.remove()
        if self._auto is not None:
            self._auto.close()
        if self._recorder is not None:
            self._recorder.abandon()
        self._accumulators.clear()
        while self._undo:
            self._undo.pop()()
        if self._patches is not None:
            self._patches.revert()
            self._patches = None
        if self.attach in self._pre_wrap_hooks:
            self._pre_wrap_hooks.remove(self.attach)
        if self._boundaries is not None:
            self._boundaries.remove()
            self._boundaries = None
        if self._manager is not None:
            self._manager.guard.end()
