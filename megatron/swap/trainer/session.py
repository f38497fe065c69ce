"""A run of Megatron's trainer: install before the model is built, follow its calls, report at its end."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from torch import nn

from megatron.swap.common.collectives import gather
from megatron.swap.common.flags import settings_of
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.log import logger
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MemoryRow, UsageError
from megatron.swap.devices.cuda import expands_segments
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.checks import check_settings
from megatron.swap.megatron_lm.hints import MegatronHints
from megatron.swap.megatron_lm.memory_needs import check_memory
from megatron.swap.megatron_lm.model_patches import RunPatches, patches_of_model
from megatron.swap.megatron_lm.optimizer_adapter import unchained
from megatron.swap.megatron_lm.param_copies import off_device
from megatron.swap.memory.host_memory import local_world_size, safe_host_bytes
from megatron.swap.native.guarding import build_guard
from megatron.swap.patches import get_megatron_optimizer, main_params, param_buffer, registry, train, training_log
from megatron.swap.reporting import memory_report
from megatron.swap.reporting.summary import (
    RankReport,
    build_summary,
    device_line,
    layer_table,
    memory_lines,
    write_json,
)
from megatron.swap.reporting.verdict import verdict_lines
from megatron.swap.run.console import Console
from megatron.swap.run.run import Run, unknown_model
from megatron.swap.run.run_device import RunDevice
from megatron.swap.trainer.checks import check_model_config
from megatron.swap.trainer.fp8_weights import choose_fp8_weights
from megatron.swap.trainer.upstream import supply_fusion_kernel, switch_fusion_off
from megatron.swap.trainer.versions import ignored_scaling


class SwapSession(Run):
    """One training run of Megatron's trainer on this rank.

    A script calls ``install``, and ``close`` if training never begins. Megatron calls the rest: ``attach`` when the
    model is built, the ``on_…`` methods through patches.
    """

    def __init__(self, args: Namespace, settings: Settings) -> None:
        facts = MegatronFacts.of(vars(args))
        console = Console(settings.log_level, facts.rank, facts.world_size)
        hints = MegatronHints(facts, settings, check_memory(facts, settings))
        super().__init__(settings, hints, console, RunDevice(settings, facts.rank, Ranges(), has_verdict=True))
        self.hints: MegatronHints
        self._args = args

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
        facts = MegatronFacts.of(vars(args))
        settings, chosen = choose_fp8_weights(facts, settings_of(args), sys.argv[1:])
        check_settings(facts, settings)
        if settings.oom_guard:
            build_guard(on_gpu=torch.cuda.is_available())
        session = cls(args, settings)
        said = filter(None, (chosen, ignored_scaling(args, model_config)))
        for line in (*said, *registry.lost_features(supply_fusion_kernel(args))):
            session._console.say(line)
        if not settings.does_anything:
            return session
        try:
            patches = patches_of(facts, settings, session.planned.kinds, session)
            applied = registry.apply(patches.needs, patches.optional)
        except BaseException:
            session.close()
            raise
        session._undo.append(applied.revert)
        for line in registry.lost_features(applied.left_out):
            session._console.say(line)
        session.hints.lacks_fusion = switch_fusion_off(applied.left_out, args, model_config)
        if model_config is not None:
            hooks = model_config.pre_wrap_hooks
            hooks.append(session.attach)
            session._undo.append(lambda: hooks.remove(session.attach) if session.attach in hooks else None)
        return session

    def attach(self, chunks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        # Since `install` Megatron's tokenizer may have set the vocabulary, and fusion may have been switched off.
        self.hints.facts = MegatronFacts.of(vars(self._args))
        self.hints.chunks += chunks
        return super().attach(chunks)

    def close(self) -> None:
        """Uninstall everything from Megatron and release all memory, after the last backward. Idempotent.

        Raises:
            DiskError: a write failed, so the state on disk is incomplete. All else is uninstalled and released.
        """
        self.release()
        self.hints.forget_model()

    def num_micro_batches(self) -> int:
        return int(get_num_microbatches())

    def on_optimizer_built(self, optimizer: Any) -> None:
        """Adapt the ``optimizer`` that Megatron has built, and give activations the host memory that it leaves.

        Raises:
            UsageError: no model was attached, or the class of the optimizer is unknown.
            HostMemoryError, DiskError: there is no room for its state.
        """
        self._attached_optimizer_swap().attach(optimizer)
        self._reserve_host_memory()

    def on_main_param_created(self, param: torch.Tensor) -> None:
        """Offload ``param``, which Megatron's optimizer has just made, if it was chosen.

        Raises:
            UsageError: no model was attached.
            HostMemoryError, DiskError: there is no room for it.
        """
        self._attached_optimizer_swap().on_main_param_created(param)

    def on_begin(self) -> None:
        """Refuse to train a model that was not attached, or that has no layers to swap.

        Raises:
            UsageError: no model was attached, and its tensors or state are to be offloaded or counted; or it has no
                ``TransformerBlock``.
        """
        needs_model = self.settings.attaches or self.run_device.observer is not None
        if needs_model and not self.run_device.is_made:
            raise unknown_model()
        if self.parts is not None and not self.parts.layers.has_chunks:
            raise UsageError(
                "the model has no TransformerBlock of Megatron, so nothing would be swapped. Train another model, or "
                "drop the --swap- flags."
            )

    def on_iteration(
        self, iteration: int, losses: dict[str, torch.Tensor], grad_norm: Any, is_logged: bool, writer: Any,
        averages_next: bool = False,
    ) -> None:  # fmt: skip
        """End ``iteration`` (from 1) as a step, and print its line if Megatron has printed its own (``is_logged``).

        ``losses`` are tensors of one element by name; empty on all pipeline stages but the last. ``grad_norm`` is of
        all ranks. ``writer`` is Megatron's TensorBoard writer, or None. ``averages_next``: Megatron's next line is a
        mean over this iteration, too.

        Raises:
            Infeasible: the planner found no plan that fits the budget.
        """
        step = self.step_ended(iteration, losses, grad_norm)
        if self.parts is not None and is_logged:
            self.step_log.show(step, self.run_device.device.peak_bytes(), writer)
            if averages_next:
                self._console.say(
                    f"Megatron's next line shows the mean loss and time of iterations {iteration} to "
                    f"{iteration + self._args.log_interval}, with or without swapping"
                )

    def on_finish(self, failure: BaseException | None, chunks: Sequence[nn.Module], optimizer: Any) -> None:
        """Report and close; after a ``failure`` only uninstall everything from Megatron.

        ``chunks`` are the model on this rank, ``optimizer`` is Megatron's, or None.

        Raises:
            DiskError: a write failed, so the state on disk is incomplete.
            OSError: the plan or the summary cannot be written.
        """
        if failure is not None and not (isinstance(failure, SystemExit) and failure.code in (None, 0)):
            # No summary that would look like a success. Megatron raises the failure itself.
            if isinstance(failure, torch.OutOfMemoryError):
                self._console.say_here(memory_lines(self._memory(self._report(), chunks, optimizer)))
            self.abandon()
            return
        if self._profiler is not None:
            self._profiler.close()
        mine = self._report()
        if self.settings.summary is not None:
            mine.memory = self._memory(mine, chunks, optimizer)
        self.close()
        self.finish()
        if (of_ranks := gather(mine)) is not None:
            self._show(of_ranks)

    def _show(self, ranks: list[RankReport]) -> None:
        path, swaps = self.settings.summary, self.planned.swaps
        summary = build_summary(self.hints.num_layers, ranks, None if self.auto is None else self.auto.summary())
        if path is not None:
            try:
                write_json(path, summary)
            except OSError as error:  # must not prevent Megatron's last checkpoint, which is still to come
                logger.warning("--swap-summary was not written: %s", error)
        if (swaps or self.settings.oom_guard) and not self._console.is_quiet:
            device = device_line(summary, expands_segments())
            verdict = [f" swap: {line}" for line in verdict_lines(self.settings, ranks)] if swaps else []
            for line in (layer_table(summary, swaps), *([] if device is None else [device]), *verdict):
                print(line, flush=True)

    def _report(self) -> RankReport:
        """Return this rank's figures. Reads losses from the device, which must be idle or broken."""
        run_device, parts, observer = self.run_device, self.parts, self.run_device.observer
        steps = self.step_log.records
        report = RankReport(
            steps=[replace(step, loss=None if step.loss is None else float(step.loss)) for step in steps],
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            device_peak_bytes=run_device.device.peak_bytes(),  # torch's own peak is reset by a recorder
            saved_peak_bytes=None if observer is None else observer.peak_bytes,
            host_booked_bytes=0, host_leased_peak_bytes=0, stayed_bytes=0,
            device_reserved_bytes=run_device.device.peak_reserved_bytes(), counted=run_device.counted,
        )
        if self.optimizer_swap is not None:
            self.optimizer_swap.report_to(report)
        if parts is not None:
            stats, layers = parts.machine.tier.stats(), parts.manager.counters.layers
            report.host_booked_bytes = stats.reserved_bytes
            report.host_leased_peak_bytes = stats.leased_peak_bytes
            report.disk_booked_bytes = stats.disk_reserved_bytes
            report.disk_leased_peak_bytes = stats.disk_peak_bytes
            report.stayed_bytes = sum(layer.stayed_bytes for layer in layers.values())
            if parts.recomputer is not None:
                report.recompute_refused = [f"{site}: {reason}" for site, reason in parts.recomputer.refused.items()]
            report.swapped_layers = sorted(number for number, layer in layers.items() if layer.out_bytes)
        return report

    def _memory(self, report: RankReport, chunks: Sequence[nn.Module], optimizer: Any) -> list[MemoryRow]:
        offloaded = () if self.optimizer_swap is None else self.optimizer_swap.offloaded_tensors()
        inner = [one.optimizer for one in unchained(optimizer)]
        return memory_report.measure(report, self.run_device.device, chunks, inner, offloaded)


def patches_of(facts: MegatronFacts, settings: Settings, kinds: Collection[str], session: SwapSession) -> RunPatches:
    """Return the patches of a run of Megatron's trainer. The patched functions call ``session`` and its hints."""
    of_model = patches_of_model(facts, settings, kinds, session.hints)
    needs = [
        train.train_patch(session.on_begin, session.on_finish),
        training_log.training_log_patch(session.on_iteration),
        *of_model.needs,
    ]
    optional = of_model.optional
    if settings.offload_fraction:
        needs += main_params.main_params_patches(session.on_main_param_created)
        needs.append(get_megatron_optimizer.get_megatron_optimizer_patch(session.on_optimizer_built))
    elif settings.acts:
        optional += main_params.main_params_patches()
    if settings.attaches:
        host_bytes = safe_host_bytes(local_world_size()).safe_bytes  # measured here, before any rank takes host memory
        optional.append(param_buffer.param_buffer_patch(functools.partial(off_device, host_bytes=host_bytes)))
    return RunPatches(needs, optional)
