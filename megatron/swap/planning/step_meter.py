"""Measures each training step: time, peak memory, saved bytes. Work between two steps does not count."""

import torch

from megatron.swap.common.types import GIB, MIB, UsageError, format_bytes
from megatron.swap.devices.base import Device, Event, Mark
from megatron.swap.planning.target import PlanTarget, RunParts
from megatron.swap.planning.workload import DRIFT, Step, Workload
from megatron.swap.profiling.footprint import Footprint


class StepClock:
    """Times steps from their first forward to their end. Evaluation and checkpoints between steps do not count."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began: Mark | None = None
        self._last: tuple[Mark, Mark, Event] | None = None  # begin, end, and the event that passes behind the end

    def begin(self) -> None:
        """Begin a forward. The first call of a step starts the clock."""
        if self._began is None:
            self._began = self._device.mark()

    def end(self, wait: bool) -> float | None:
        """End a step, and return its duration in ms (``wait``), or that of the step before; None if not yet known."""
        last, self._last = self._last, None
        if self._began is not None:
            stream = self._device.current_stream()
            self._last = self._began, self._device.mark(), self._device.record(stream)
            self._began = None
        if wait:
            self._device.synchronize()
            last = self._last
        if last is None or not self._device.has_passed(last[2]):
            return None
        began, ended, _ = last
        return ended.elapsed_ms_since(began)

    def forget(self) -> None:
        """Drop the time of the last step, which says nothing of the next ones."""
        self._last = None


class StepMeter:
    """Measures the steps of a rank. In a forward that saves more than expected the policy becomes short of memory."""

    def __init__(self, target: PlanTarget, parts: RunParts) -> None:
        self._target = target
        self._parts = parts
        self._clock = StepClock(parts.device)
        self._expected_micro_batches: int | None = None
        self._is_between_steps = True
        self._reserved_bytes: int | None = None  # until the first step has ended
        self.num_micro_batches = 0

    def expect(self, workload: Workload | None, footprint: Footprint | None) -> None:
        """Keep little in a step that saves more than ``workload``, whose layers save ``footprint``; None: in none."""
        self._expected_micro_batches = None if workload is None else workload.num_micro_batches
        self._parts.footprint.expect(footprint, 1 + DRIFT, self._exceeded)
        self._clock.forget()

    def _exceeded(self) -> None:
        self._target.policy.is_short = True

    def end_step(self, number: int, footprint: Footprint, wait: bool, full_gib: float, short_bytes: int) -> Step:
        """Return the measurements of the step that ended; ``wait``: with its own time, not that of the step before."""
        ms = self._clock.end(wait)
        peak_gib = self._peak_gib()
        if short_bytes:
            # The device had no room for these bytes, because it has less memory than the budget allows.
            peak_gib = max(peak_gib, self._target.budget_gib) + short_bytes / GIB
        saved_mib = footprint.num_bytes / MIB
        return Step(number, ms, peak_gib, footprint.num_tensors, saved_mib, self.num_micro_batches, full_gib)

    def leave_step(self) -> None:
        """Note the memory that the device has reserved, once all work between two steps is done."""
        self._reserved_bytes = self._parts.device.reserved_bytes() or 0
        self._is_between_steps = True

    def chunk_begins(self) -> None:
        """Measure a forward, before the recorder does: memory from between the steps must be released by then."""
        if not torch.is_grad_enabled():  # an evaluation between two steps, or another pass within one
            return
        if self._is_between_steps:
            self._is_between_steps = False
            self._begin_step()
        self._clock.begin()
        self._parts.footprint.begin_chunk()
        before, self.num_micro_batches = self.num_micro_batches, self._parts.num_micro_batches()
        if self.num_micro_batches != before:
            self._clock.forget()  # otherwise the last step's time would be reported as this one's
        expected = self._expected_micro_batches
        if expected is not None and min(self.num_micro_batches, self._target.most_micro_batches) > expected:
            self._exceeded()  # a pipeline may hold more micro-batches at once

    def _begin_step(self) -> None:
        """Forget memory that an evaluation, a checkpoint or building the model held beyond training steps."""
        device = self._parts.device
        if self._reserved_bytes is None:
            self._check_room(device.allocated_bytes() or 0)
        self._parts.take_peak()
        device.take_retries()
        if (device.reserved_bytes() or 0) > (self._reserved_bytes or 0):
            device.release_cached()

    def _check_room(self, held_bytes: int) -> None:
        """Raise ``UsageError`` before the first step if this rank's device holds more than the budget."""
        # The optimizer exists, with as much state offloaded as may be, and nothing is saved for backward yet.
        budget_gib = self._target.budget_gib
        if held_bytes > budget_gib * GIB:
            is_planned = self._target.settings.plans_optimizer
            offload = "" if is_planned else "offload optimizer state (--swap-optimizer auto), "
            remedy = self._target.remedy or (
                f"Raise --swap-memory-gib or --swap-memory-fraction, {offload}or split the model further "
                "(--use-distributed-optimizer, --tensor-model-parallel-size, --pipeline-model-parallel-size)."
            )
            raise UsageError(
                f"the planner may use {budget_gib:g} GiB of device memory, and weights, gradients and optimizer "
                f"state take {format_bytes(held_bytes)} before the first step. {remedy}"
            )

    def _peak_gib(self) -> float:
        # The allocator releases nothing within a step, so the bytes that it has reserved at the end are the peak.
        reserved_bytes = self._parts.device.reserved_bytes()
        if reserved_bytes is not None:
            return reserved_bytes / GIB
        return 0.0 if self._parts.recorder.is_on else self._parts.take_peak()[0] / GIB
