"""Carries out decisions of the state machine: measures steps, makes profiles and plans, applies plans, saves files.

Everything happens between two steps, on all ranks at once, and every step trains. One plan covers the whole model.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron.swap.common.plan import Plan, save_plan
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, SwapError, UsageError, format_bytes
from megatron.swap.planner.profile import Profile, save_profile
from megatron.swap.planner.simulate import with_measured_step
from megatron.swap.planning.consensus import Ranks
from megatron.swap.planning.pipeline_planner import PipelinePlanner
from megatron.swap.planning.state_machine import Measurement, Stage, StateMachine, Transition
from megatron.swap.planning.step_meter import StepMeter
from megatron.swap.planning.target import PlanTarget, RunParts
from megatron.swap.planning.workload import Step, Workload
from megatron.swap.planning.workload_profiler import WorkloadProfiler

SAVE_PLAN, SAVE_PROFILE = "--swap-save-plan", "--swap-save-profile"
FULL_BYTES = GIB // 2  # assumed excess of a step in which the device was full: the true excess is not known


class PlanFiles:
    """Writes plan and profile where the settings ask for them. ``say`` takes a line if that fails."""

    def __init__(self, settings: Settings, rank: int, stage: int, say: Callable[[str], None]) -> None:
        asked = {SAVE_PLAN: settings.save_plan, SAVE_PROFILE: settings.save_profile}
        self.paths = {flag: Path(path) for flag, path in asked.items() if path is not None}  # by flag
        self._rank, self._stage, self._say = rank, stage, say

    def save(self, plan: Plan | None, profile: Profile, leaders: dict[int, int]) -> None:
        """Write the whole model's plan (rank 0), and the profile of this rank's stage (``leaders[stage]``)."""
        for flag, path in self.paths.items():
            try:
                if flag == SAVE_PLAN:
                    if plan is not None and self._rank == 0:
                        save_plan(plan, path)
                elif leaders[self._stage] == self._rank:
                    of_stage = f"{path.stem}.stage-{self._stage}{path.suffix}"
                    save_profile(profile, path.with_name(of_stage) if len(leaders) > 1 else path)
            except OSError as error:
                self._say(f"{flag} was not written: {error}")


class AutoPlan:
    """The planner beside a training run. ``say`` takes a line that all ranks have, ``say_here`` lines of this rank."""

    def __init__(
        self, target: PlanTarget, parts: RunParts, say: Callable[[str], None], say_here: Callable[[Sequence[str]], None]
    ) -> None:
        # The first step follows the safe policy, which keeps as little as it can.
        self._target = target
        self._parts = parts
        self._say, self._say_here = say, say_here
        self.ranks = Ranks(target.timeout_minutes)
        self._machine = StateMachine(target.search_limits(parts.device.keeps_time), self._make_plans)
        self._meter = StepMeter(target, parts)
        self._profiler = WorkloadProfiler(target, parts, self.ranks)
        self._planner = PipelinePlanner(self.ranks, parts.pipeline_rank, target.settings.max_candidates)
        self._files = PlanFiles(target.settings, self.ranks.rank, parts.pipeline_rank, lambda line: say_here([line]))
        self._guard = parts.guard
        self._reported: dict[str, Plan | None] = {}
        self.has_switched = False  # whether the next step holds another amount of memory than the last one
        # Measurements of the last step, the worst of all ranks; None if there was none.
        self.last_step: Step | None = None
        self._switch_guard()
        budget = format_bytes(target.budget_gib * GIB)
        say(f"at most {budget} of device memory; the first steps are measured")

    def chunk_begins(self) -> None:
        self._meter.chunk_begins()

    @property
    def stage(self) -> str:
        """The stage of the next step: ``profile``, ``search`` or ``stable``."""
        return self._machine.stage.value

    @property
    def plan(self) -> Plan | None:
        """The plan of the next step; None if there is none yet, or everything is kept."""
        return self._machine.plan

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is recorded or timed, or settles before that. Nothing else may run beside it."""
        return self._machine.stage is Stage.PROFILE

    @property
    def is_settled(self) -> bool:
        """Whether a plan was chosen and the next step follows it as the last one did."""
        return self._machine.stage is Stage.STABLE and not self.has_switched

    def tier_is_full(self, error: SwapError) -> None:
        """Report once that storages are kept because the tier is full."""
        self._report_once("tier", f"no room outside the device for some saved tensors: they are kept for now ({error})")

    def close(self) -> None:
        self._profiler.timer.abandon()

    def step_ended(
        self, number: int, short_bytes: int = 0, num_retries: int = 0, *, has_new_numbers: bool = False
    ) -> None:
        """End step ``number``: measure it, agree with the other ranks, decide, and switch.

        The device had no room for ``short_bytes``, because it has less memory than the budget allows. For
        ``num_retries`` allocations the allocator released its cache. ``has_new_numbers`` as in ``StateMachine``.
        Raises ``Infeasible`` if no plan fits and none was made before, and ``RankError`` if another rank failed.
        """
        self.has_switched = self._target.policy.is_short
        step = self.last_step = self.ranks.worst(lambda: self._measure(number, short_bytes, num_retries))
        self._profiler.step_ended(step)
        self._carry_out(self._machine.step_ended(step, has_new_numbers), number + 1)
        self._meter.leave_step()
        self._switch_guard()

    def _measure(self, number: int, short_bytes: int, num_retries: int) -> Step:
        footprint = self._profiler.complete(self._parts.footprint.take(), self._machine.planned)
        full_gib = 0.0
        if num_retries > 0 and not short_bytes and not self.is_measuring:
            # The allocator has to reserve the released memory again, which makes steps slow.
            full_gib = FULL_BYTES / GIB
            self._report_once(
                "device",
                f"the device is full: its allocator had to release its cache {num_retries} times in a step. "
                f"That counts as {format_bytes(FULL_BYTES)} above the budget",
            )
        is_waited_for = self._machine.stage is not Stage.STABLE
        return self._meter.end_step(number, footprint, is_waited_for, full_gib, short_bytes)

    def _carry_out(self, transition: Transition, number: int) -> None:
        for line in transition.lines:
            self._say(line)
        if transition.measurement is Measurement.FINISH_RECORDING:
            num_micro_batches = self._meter.num_micro_batches
            plan = self._planner.whole_layers(
                lambda: self._profiler.finish_recording(num_micro_batches), self._target.budget_gib
            )
            if plan is not None:  # layers that are recomputed whole can be timed with little beside them
                self.ranks.all_or_none(lambda: self._apply_plan(plan))
        elif transition.measurement is not Measurement.RECORD:
            self._parts.recorder.abandon()
        if transition.measurement is Measurement.TIME:
            self._profiler.timer.start(number)
        if transition.is_new_plan:
            self.ranks.all_or_none(lambda: self._apply_plan(transition.plan))
        elif self._target.policy.is_short:
            self._target.policy.is_short = False
            self._parts.layers.apply_policy(self._target.settings.window_bytes(transition.plan))
            self._parts.device.release_cached()
        if transition.measurement is Measurement.RECORD:
            self._profiler.record(number)
        if transition.is_settled:
            self._save()

    def _apply_plan(self, plan: Plan | None) -> None:
        parts, settings = self._parts, self._target.settings
        self.has_switched = True
        self._target.policy.apply_plan(plan)
        parts.layers.apply_policy(settings.window_bytes(plan))
        if settings.plans_optimizer:
            parts.device.release_cached()  # reloaded state must not fragment the last plan's memory
            parts.set_offload_fraction(1.0 if plan is None or plan.offload_fraction is None else plan.offload_fraction)
        planned = self._machine.planned
        self._meter.expect(planned, None if planned is None else self._profiler.measured(planned).footprint)
        parts.device.release_cached()

    def _make_plans(self, workload: Workload, budget_gib: float, reserve_gib: float | None) -> Sequence[Plan]:
        return self._planner.plans(lambda: self._profiler.measured(workload).profile, budget_gib, reserve_gib)

    def _switch_guard(self) -> None:
        """Switch the out-of-memory guard on while steps are measured, and off afterwards."""
        if self._guard is None or self._guard.is_on == self.is_measuring:
            return
        if not self.is_measuring:
            self._guard.end()
            return
        try:
            self._guard.begin()
        except UsageError as error:
            self._guard = None
            self._say(f"no out-of-memory guard while the first steps are measured: {error}")

    def _report_once(self, what: str, line: str) -> None:
        """Print ``line`` once for each plan, on this rank alone."""
        if self._reported.get(what, False) is not self._machine.plan:
            self._reported[what] = self._machine.plan
            self._say_here([line])

    def finish(self) -> None:
        """Report, if training ended before a plan was chosen, and save a plan that is being tried."""
        machine = self._machine
        if machine.has_been_stable:
            return
        flags = " and ".join(self._files.paths)
        line = f"training ended before a plan was chosen, which takes up to {machine.num_steps_needed} steps"
        if machine.planned is not None:
            self._save()
            line += f"; {flags}: written from a plan that was not compared with others" if flags else ""
        elif flags:
            line += f"; {flags}: not written"
        self._say(line)

    def _save(self) -> None:
        """Write the plan, and the profile of each stage, as soon as a plan is chosen."""
        if (workload := self._machine.planned) is not None:
            profile, plan = self._profiler.measured(workload).profile, self._machine.best_plan
            is_alike = profile.num_micro_batches == self._meter.num_micro_batches  # workloads count up to a limit
            # The plan is for the sites of the rank that has solved for the stage. Context parallel ranks have others.
            leads = self._planner.leaders.get(self._parts.pipeline_rank) == self.ranks.rank
            may_add_step = leads and is_alike and self._parts.device.keeps_time
            if plan is not None and workload.best_ms is not None and may_add_step:
                profile = with_measured_step(profile, plan, workload.best_ms)
            self._files.save(plan, profile, self._planner.leaders)

    def summary(self) -> dict[str, Any]:
        machine, plan = self._machine, self._machine.plan
        predicted = None if plan is None else plan.predicted
        ends = [entry.first_step - 1 for entry in machine.history[1:]]
        return {
            "budget_gib": self._target.budget_gib,
            "predicted_peak_gib": None if predicted is None else predicted.peak_gib,
            "predicted_step_ms": None if predicted is None else predicted.step_ms,
            "lower_bound_ms": None if predicted is None else predicted.lower_bound_ms,
            "profile_sha256": None if plan is None else plan.profile_sha256,
            "num_replans": machine.num_replans,
            "num_infeasible": machine.num_infeasible,
            "stages": [
                {"stage": entry.stage.value, "first_step": entry.first_step, "last_step": last, "note": entry.note,
                 "predicted_peak_gib": entry.predicted_peak_gib}
                for entry, last in zip_longest(machine.history, ends)
            ],
        }  # fmt: skip
