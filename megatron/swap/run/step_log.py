"""The bytes that each training step moved, and their printed and logged figures."""

from dataclasses import replace
from typing import Any

import torch

from megatron.swap.common.collectives import rank_and_world_size
from megatron.swap.common.counters import Totals
from megatron.swap.common.settings import Settings
from megatron.swap.devices.base import Device
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.reporting.summary import StepRecord, idle_line, refused_lines, rescue_lines, scalars, step_line
from megatron.swap.run.console import Console

NUM_UNREAD = 256  # losses that stay on the device until all are read at once: each takes 512 bytes of a GPU


class StepLog:
    def __init__(self, settings: Settings, console: Console) -> None:
        # With `--swap-summary` one record per step, about a kilobyte of host memory each. Without it two, so that
        # memory does not grow: the sum of all but the last, and the last.
        self.records: list[StepRecord] = []
        self._settings = settings
        self._console = console
        self._totals = Totals()
        self._num_refused_said = 0

    def take(
        self, iteration: int, losses: dict[str, torch.Tensor], grad_norm: Any, device: Device,
        manager: SwapManager | None,
    ) -> StepRecord:  # fmt: skip
        """Record ``iteration``. ``losses`` begin with the loss; ``manager`` is None if no saved tensor is touched."""
        totals = manager.counters.totals() if manager is not None else Totals()
        moved, self._totals = totals.since(self._totals), totals
        rescues = manager.guard.take_rescues() if manager is not None else []
        self._console.say_here(rescue_lines(rescues))
        # The loss is read later: reading it now would make the host wait for the device.
        loss = next(iter(losses.values()), None) if self._settings.summary is not None else None
        step = StepRecord(
            iteration=iteration, moved=moved, loss=None if loss is None else loss.detach().clone(),
            grad_norm=None if grad_norm is None else float(grad_norm), num_rescues=len(rescues),
            rescued_bytes=sum(rescue.freed_bytes for rescue in rescues),
            short_bytes=max((rescue.short_bytes for rescue in rescues), default=0),
            num_alloc_retries=device.take_retries(),
        )  # fmt: skip
        self._compact()
        self.records.append(step)
        return step

    def _compact(self) -> None:
        """Reduce the records of the steps so far. Only the last step's layers are reported."""
        if not self.records:
            return
        if self._settings.summary is None:
            self.records = [self.records[0].plus(self.records[1])] if len(self.records) > 1 else self.records
            return
        last = self.records[-1]
        self.records[-1] = replace(last, moved=last.moved.without_layers())
        if len(self.records) % NUM_UNREAD == 0:
            unread = [number for number, record in enumerate(self.records) if isinstance(record.loss, torch.Tensor)]
            losses = torch.stack([self.records[number].loss.view(()) for number in unread]).tolist() if unread else []
            for number, loss in zip(unread, losses, strict=True):
                self.records[number] = replace(self.records[number], loss=loss)

    def say_refused(self, recomputer: Recomputer) -> None:
        """Print each tensor that should be recomputed and is not, once."""
        refused = list(recomputer.refused.items())
        lines = refused_lines(refused[self._num_refused_said :])
        self._num_refused_said = len(refused)
        if len(self.records) == 1:
            lines += [idle_line(kind) for kind in self._settings.recompute if not recomputer.spared_bytes[kind]]
        self._console.say_here(lines)

    def show(self, step: StepRecord, peak_bytes: int | None, writer: Any) -> None:
        """Print the line of ``step``, and write its scalars to Megatron's TensorBoard ``writer``, if there is one."""
        rank, world_size = rank_and_world_size()
        if rank == world_size - 1:  # Megatron prints the log of the last rank
            self._console.say_here([step_line(step, peak_bytes)])
        if writer is not None:
            for name, value in scalars(step, peak_bytes).items():
                writer.add_scalar(name, value, step.iteration)
