"""The stages of a run that plans itself: profile, search, stable, and back when training steps change.

The state machine only decides, between two steps: which plan the next step follows and what is measured of it. All
ranks pass in the same figures (``consensus.py`` merges them), so all ranks decide the same.

- *Profile*: one step warms up. Some are recorded under the safe policy, which keeps as little as it can. Then some are
timed with layers recomputed whole, if that fits.
- *Search*: the solver's best plans run one after the other. The fastest within the budget is kept.
- *Stable*: nothing is recorded. Other sites or sizes, a peak above the budget, or slower steps lead back. A workload
that was planned before gets its plan at once.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from megatron.swap.common.plan import Infeasible, Plan
from megatron.swap.common.types import GIB, format_bytes
from megatron.swap.planner.solve import MAX_TIGHTENINGS, MAX_WIDENINGS, WIDENED_GAIN
from megatron.swap.planning.change_detector import MAX_RECORDED_STEPS, ChangeDetector
from megatron.swap.planning.search import CandidateSearch, Trial, offload_note
from megatron.swap.planning.workload import DRIFT, Step, Workload

RECORDED_STEPS = 2  # steps whose saved storages are recorded
TIMED_STEPS = 3  # steps timed with no recording and no copies beside them; odd, since the median counts
SETTLING_STEPS = 1  # steps after a switch in which the engine learns the order and sizes of its copies; not judged


PlanMaker = Callable[[Workload, float, float | None], Sequence[Plan]]
"""Returns plans for a workload, the best first, which the cost model puts below the given GiB; raises ``Infeasible``.
The third argument is the memory to leave free for fragments; None: as much as the profile says. Called on all ranks
alike."""


class Stage(Enum):
    PROFILE = "profile"
    SEARCH = "search"
    STABLE = "stable"


class Measurement(Enum):
    NONE = auto()  # only the measurements of every step
    RECORD = auto()  # which storages the step saves, and when
    FINISH_RECORDING = auto()  # none: the profile is built, the next step settles, and steps behind it are timed
    TIME = auto()  # the times of layers, with nothing else recorded


@dataclass(frozen=True)
class Transition:
    stage: Stage  # stage of the next step
    plan: Plan | None = None  # plan of the next step; None: the safe policy
    is_new_plan: bool = False  # the last step ran under another plan
    measurement: Measurement = Measurement.NONE  # of the next step
    is_settled: bool = False  # the search has ended, so that plan and profile can be saved
    lines: tuple[str, ...] = ()  # for people, in order


@dataclass(frozen=True)
class StageEntry:
    """A stage from ``first_step`` on. ``predicted_peak_gib``: highest predicted peak of the stage's plans."""

    first_step: int
    stage: Stage
    note: str
    predicted_peak_gib: float | None


@dataclass(frozen=True)
class SearchLimits:
    budget_gib: float  # most memory that the device may hold
    max_candidates: int  # plans that are tried
    keeps_time: bool = True  # whether the device's times are meaningful, so that slower steps lead to a new plan
    most_micro_batches: int = sys.maxsize  # steps with more micro-batches hold no more memory
    settling_steps: int = SETTLING_STEPS  # first steps of a candidate, which are not judged

    @property
    def num_steps_needed(self) -> int:
        """Most steps until a plan is chosen, as long as the steps are alike and the first plans fit."""
        num_profiled = SETTLING_STEPS + RECORDED_STEPS + SETTLING_STEPS + TIMED_STEPS
        return num_profiled + (self.max_candidates + self.max_widenings) * (self.settling_steps + 1)

    @property
    def max_widenings(self) -> int:
        """Most plans that are tried beyond the candidates; none for users who want one candidate."""
        return MAX_WIDENINGS if self.max_candidates > 1 else 0


@dataclass
class _Recording:
    """Stage PROFILE, first part, until a step saves ``until_mib``."""

    until_mib: float = 0.0
    workload: Workload | None = None
    num_steps: int = 0
    stage = Stage.PROFILE
    plan = None


@dataclass
class _Timing:
    """Stage PROFILE, second part."""

    workload: Workload
    num_timed: int = 0
    num_steps: int = 0
    stage = Stage.PROFILE
    plan = None


@dataclass
class _Searching:
    """Stage SEARCH; ``num_steps`` of the candidate that runs."""

    workload: Workload
    search: CandidateSearch
    num_steps: int = 0
    stage = Stage.SEARCH

    @property
    def plan(self) -> Plan:
        return self.search.plan


@dataclass
class _Stable:
    workload: Workload
    plan: Plan
    num_steps: int = 0
    stage = Stage.STABLE


class StateMachine:
    """Decides after each step about the next one. ``make_plans`` solves for plans."""

    def __init__(self, limits: SearchLimits, make_plans: PlanMaker) -> None:
        # Plans that were made or taken up after the first, and workloads for which no plan fits the budget.
        self.num_replans = self.num_infeasible = 0
        self.history: list[StageEntry] = []  # the stages that were entered
        self._limits = limits
        self._make_plans = make_plans
        self._state: _Recording | _Timing | _Searching | _Stable = _Recording()
        self._known: dict[Workload, Plan] = {}
        self._changes = ChangeDetector()
        self._num_micro_batches = 0
        self._refusal: Infeasible | None = None  # of the first workload, while it is tried whether a plan fits

    @property
    def stage(self) -> Stage:
        return self._state.stage

    @property
    def plan(self) -> Plan | None:
        """The plan of the next step; None: the safe policy."""
        return self._state.plan

    @property
    def best_plan(self) -> Plan | None:
        """The plan that has won so far for the workload of the next step, or else the plan of the next step."""
        return self._known.get(self.planned, self.plan) if self.planned is not None else self.plan

    @property
    def planned(self) -> Workload | None:
        """The workload that the plan was made for; None under the safe policy."""
        return self._state.workload if isinstance(self._state, _Searching | _Stable) else None

    @property
    def num_steps_needed(self) -> int:
        return self._limits.num_steps_needed

    @property
    def has_been_stable(self) -> bool:
        return any(entry.stage is Stage.STABLE for entry in self.history)

    def step_ended(self, step: Step, has_new_numbers: bool = False) -> Transition:
        """Decide about the next step, or raise ``Infeasible``: no plan fits, and none was made before.

        ``has_new_numbers``: the layers have other numbers from the next step on, so all measurements are void.
        """
        if not self.history:
            self.history.append(StageEntry(step.number, Stage.PROFILE, "the plan that holds least", None))
        state = self._state
        if step.num_micro_batches != self._num_micro_batches:
            self._num_micro_batches = step.num_micro_batches
            for workload in (*self._known, *([state.workload] if state.workload is not None else [])):
                workload.best_ms = None  # durations change with the number of micro-batches
            if isinstance(state, _Searching):
                state.search.restart()
        step = replace(step, num_micro_batches=min(step.num_micro_batches, self._limits.most_micro_batches))
        if has_new_numbers:
            return self._begin_profile(step, "a backward has entered layers for the first time")
        state.num_steps += 1
        match state:
            case _Recording():
                return self._record(state, step)
            case _Timing():
                return self._time(state, step)
            case _Searching():
                return self._search(state, step)
            case _Stable():
                return self._watch(state, step)

    def _record(self, state: _Recording, step: Step) -> Transition:
        if state.num_steps <= SETTLING_STEPS:
            return self._stay(Measurement.RECORD, self._warn_while_measuring(step))
        if state.workload is None:
            state.workload = Workload(step.num_tensors, step.num_tensors, step.saved_mib, step.num_micro_batches)
        elif state.workload.num_micro_batches != step.num_micro_batches:
            return self._begin_profile(step, "the number of micro-batches changed while steps were recorded")
        workload = state.workload
        workload.include(step)
        num_recorded = state.num_steps - SETTLING_STEPS
        is_large_enough = state.until_mib <= (1 + DRIFT) * workload.saved_mib
        if num_recorded < (RECORDED_STEPS if is_large_enough else MAX_RECORDED_STEPS):
            return self._stay(Measurement.RECORD)
        if not is_large_enough:
            self._changes.missed_large_steps(state.until_mib)
            known = self._nearest_known(replace(step, saved_mib=workload.saved_mib))
            if known is not None:
                note = f"micro-batches that save {state.until_mib:,.1f} MiB are too rare to plan for"
                return self._take_up(step, known, note)
        return self._change_to(_Timing(workload), Measurement.FINISH_RECORDING)

    def _warn_while_measuring(self, step: Step) -> tuple[str, ...]:
        over_gib = step.peak_gib - self._limits.budget_gib
        if over_gib <= 0:
            return ()
        line = f"the peak is {format_bytes(over_gib * GIB)} above the budget while steps are measured"
        return (f"{line}: a plan below it follows, or the smallest budget that would do",)

    def _time(self, state: _Timing, step: Step) -> Transition:
        # A step of another size says nothing about the duration of the recorded ones.
        state.num_timed += state.num_steps > SETTLING_STEPS and state.workload.saves_as_much_as(step)
        if state.num_timed >= TIMED_STEPS or state.num_steps >= SETTLING_STEPS + MAX_RECORDED_STEPS:
            plans, lines = self._first_plans(state.workload)
            return self._begin_search(step, state.workload, plans, lines)
        return self._stay(Measurement.TIME if state.num_steps >= SETTLING_STEPS else Measurement.NONE)

    def _begin_profile(self, step: Step, why: str) -> Transition:
        return self._enter(step, _Recording(step.saved_mib), why)

    def _first_plans(self, workload: Workload) -> tuple[Sequence[Plan], tuple[str, ...]]:
        """Return plans for a workload that was just measured, and lines for users, or raise ``Infeasible``."""
        try:
            return self._make_plans(workload, self._limits.budget_gib, None), ()
        except Infeasible as error:
            if self.num_replans == 0:
                # Fragments were measured under the safe policy, so plans of the first workload may fit after all.
                if error.smallest_gib - error.fragments_gib > self._limits.budget_gib:
                    raise
                self._refusal = error
                line = f"plans are predicted to hold {error.smallest_gib:.10g} GiB at least, and may hold less: tried"
                return self._make_plans(workload, error.smallest_gib, None), (line,)
            # The end of the run would lose the training so far, so plans that hold least are used.
            self.num_infeasible += 1
            workload.num_tightened = MAX_TIGHTENINGS + 1  # no plan holds less than these
            smallest = f"{error.smallest_gib:.10g} GiB"
            line = f"no plan keeps such steps below the budget ({smallest} would do): plans that hold least are used"
            return self._make_plans(workload, error.smallest_gib, None), (line,)

    def _begin_search(
        self, step: Step, workload: Workload, plans: Sequence[Plan], lines: tuple[str, ...] = ()
    ) -> Transition:
        plans = plans[: self._limits.max_candidates]
        if len(plans) == 1 and plans[0].keeps_all:
            note = f"the budget is above the need: nothing is swapped{offload_note(plans[0])}"
            return self._settle(step, workload, plans[0], None, note, lines)
        note = f"plans to try: {len(plans)}"
        peak_gib = _highest_prediction(plans)
        if peak_gib is not None:
            note += f" (predicted to hold {format_bytes(peak_gib * GIB)} at most)"
        search = CandidateSearch(plans, workload.too_high_gib)
        return self._enter(step, _Searching(workload, search), note, peak_gib, lines)

    def _search(self, state: _Searching, step: Step) -> Transition:
        if self._changes.has_changed(step, state.workload, self._is_known):
            return self._change_plan(state, step)
        is_judged = state.workload.saves_as_much_as(step) and state.num_steps > self._limits.settling_steps
        if not is_judged or step.ms is None:
            return self._stay()
        search = state.search
        search.add(Trial(state.plan, step.ms, step.peak_gib, step.over_gib(self._limits.budget_gib)))
        if not search.is_over:
            search.go_on()
            state.num_steps = 0
            return Transition(state.stage, state.plan, is_new_plan=True)
        best = search.fastest()
        if best is None:
            return self._tighten(state, step, search.lowest())
        self._refusal = None
        wider = self._widen(state, best)
        if wider is not None:
            return wider
        return self._settle(step, state.workload, best.plan, best.ms, search.describe(best))

    def _widen(self, state: _Searching, best: Trial) -> Transition | None:
        """Try a plan for the memory that ``best`` left free, or return None if none is expected to be faster."""
        workload, predicted = state.workload, best.plan.predicted
        free_gib = self._limits.budget_gib - best.peak_gib
        if predicted is None or free_gib <= 0:
            return None
        # Training may end before the further plans are through, or save other tensors: the chosen plan stays.
        self._known[workload], workload.best_ms = best.plan, best.ms
        if workload.num_widened >= self._limits.max_widenings:
            return None
        workload.num_widened += 1
        try:
            # The solver leaves memory free for fragments. Trials show how much plans need here, so bisection finds it.
            wider_gib = state.search.wider_gib(predicted.peak_gib, free_gib)
            solver_gib = self._limits.budget_gib - workload.spare_gib
            plans = self._make_plans(workload, solver_gib, solver_gib - wider_gib)
        except Infeasible:  # the search is not exhaustive
            return None
        plan = next((one for one in plans if not state.search.has_tried(one)), None)
        if plan is None or plan.predicted is None or plan.predicted.step_ms > (1 - WIDENED_GAIN) * predicted.step_ms:
            return None
        state.search.plan = plan
        state.num_steps = 0
        highest_gib = max(self.history[-1].predicted_peak_gib or 0.0, plan.predicted.peak_gib)
        self.history[-1] = replace(self.history[-1], predicted_peak_gib=highest_gib)
        line = f"the best plan left {format_bytes(free_gib * GIB)} of the budget free: one more plan to try"
        return Transition(state.stage, plan, is_new_plan=True, lines=(line,))

    def _settle(
        self, step: Step, workload: Workload, plan: Plan, ms: float | None, note: str, lines: tuple[str, ...] = ()
    ) -> Transition:
        workload.best_ms, self._refusal = ms, None
        self._known[workload] = plan
        self._changes.reset()
        return self._enter(step, _Stable(workload, plan), note, _highest_prediction([plan]), lines)

    def _tighten(self, state: _Searching | _Stable, step: Step, lowest: Trial) -> Transition:
        """Plan again with a smaller budget, since even the lowest measured peak is above the budget."""
        if self._refusal is not None:  # no plan was predicted to fit the first workload, and none did
            raise self._refusal
        workload, budget_gib = state.workload, self._limits.budget_gib
        above = f"{format_bytes(lowest.over_gib * GIB)} above the budget"
        where = above if lowest.peak_gib > budget_gib else "at all that the device has"
        lines: tuple[str, ...] = ()
        workload.num_tightened += 1
        if workload.num_tightened <= MAX_TIGHTENINGS:
            # The solver's budget shrinks by its error, or by the excess if that is more.
            workload.leave_more(lowest.over_gib, lowest.peak_gib, lowest.plan.predicted)
            spare = format_bytes(workload.spare_gib * GIB)
            lines = (f"the peak was {where}: planned again with {spare} to spare",)
            self.num_replans += 1
            try:
                plans = self._make_plans(workload, budget_gib - workload.spare_gib, None)
            except Infeasible:
                workload.num_tightened = MAX_TIGHTENINGS + 1
            else:
                return self._begin_search(step, workload, plans, lines)
        # Training goes on under the plan that exceeds the budget least: it runs.
        note = f"no plan was found that does better: the peak stays {where}"
        return self._settle(step, workload, lowest.plan, None, note, lines)

    def _watch(self, state: _Stable, step: Step) -> Transition:
        workload = state.workload
        if self._changes.has_changed(step, workload, self._is_known):
            return self._change_plan(state, step)
        if not workload.saves_as_much_as(step) or state.num_steps <= SETTLING_STEPS:
            return self._stay()
        over_gib = step.over_gib(self._limits.budget_gib)
        if over_gib > 0 and workload.num_tightened <= MAX_TIGHTENINGS:
            return self._tighten(state, step, Trial(state.plan, step.ms or 0.0, step.peak_gib, over_gib))
        if workload.best_ms is None:
            workload.best_ms = step.ms
        elif self._limits.keeps_time and self._changes.is_slower(step, workload):
            del self._known[workload]
            self.num_replans += 1
            return self._begin_profile(step, f"steps take {step.ms:.0f} ms instead of {workload.best_ms:.0f}")
        return self._stay()

    def _change_plan(self, state: _Searching | _Stable, step: Step) -> Transition:
        """Take up the plan of the workload that trains now, or measure that workload."""
        before, self._refusal = state.workload, None
        self.num_replans += 1
        what = f"micro-batches save {step.saved_mib:,.1f} MiB each, not {before.saved_mib:,.1f}"
        if step.num_micro_batches != before.num_micro_batches:
            what = f"steps have {step.num_micro_batches} micro-batches, not {before.num_micro_batches}"
        elif not before.has_sites_of(step):
            what = "other tensors are saved than before"
        known = self._nearest_known(step)
        self._changes.changed(step, before, known is not None)
        return self._begin_profile(step, what) if known is None else self._take_up(step, known, what)

    def _is_known(self, step: Step) -> bool:
        return self._nearest_known(step) is not None

    def _nearest_known(self, step: Step) -> Workload | None:
        alike = [workload for workload in self._known if workload.is_like(step)]
        return min(alike, key=lambda workload: abs(workload.saved_mib - step.saved_mib), default=None)

    def _take_up(self, step: Step, known: Workload, why: str) -> Transition:
        return self._settle(step, known, self._known[known], known.best_ms, f"{why}: the plan is known")

    def _stay(self, measurement: Measurement = Measurement.NONE, lines: tuple[str, ...] = ()) -> Transition:
        return Transition(self.stage, self.plan, measurement=measurement, lines=lines)

    def _enter(
        self, step: Step, state: _Recording | _Searching | _Stable, note: str, predicted_peak_gib: float | None = None,
        lines: tuple[str, ...] = (),
    ) -> Transition:  # fmt: skip
        first_step = step.number + 1
        self.history.append(StageEntry(first_step, state.stage, note, predicted_peak_gib))
        line = f"{state.stage.value} from step {first_step}: {note}"
        return self._change_to(state, Measurement.NONE, (*lines, line))

    def _change_to(
        self, state: _Recording | _Timing | _Searching | _Stable, measurement: Measurement, lines: tuple[str, ...] = ()
    ) -> Transition:
        before, self._state = self._state, state
        return Transition(
            stage=state.stage,
            plan=state.plan,
            is_new_plan=state.plan is not before.plan or isinstance(before, _Timing),  # layers may be recomputed whole
            measurement=measurement,
            is_settled=state.stage is Stage.STABLE and before.stage is not Stage.STABLE,
            lines=lines,
        )


def _highest_prediction(plans: Sequence[Plan]) -> float | None:
    return max((plan.predicted.peak_gib for plan in plans if plan.predicted is not None), default=None)
