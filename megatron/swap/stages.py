"""The stages of a run that plans itself: profile, search, stable, and back when what it trains on changes.

Decisions alone, at the boundaries of steps: which plan the next step follows and whether it is recorded. All ranks are
told the same figures (``auto.py`` merges them), so they decide the same.

- *Profile*: a step to warm up and some that are recorded, under the plan that holds least; then some that are timed, in
  which layers run as a whole where that fits. They train like any other.
- *Search*: the best plans of the solver run, one after the other; the fastest that stays below the budget is kept.
- *Stable*: nothing is recorded. Other sites or sizes, a peak above the budget, or steps that have become slower lead
  back; a workload that was planned before gets its plan at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from megatron.swap.plan import Infeasible, Plan
from megatron.swap.types import GIB, format_bytes

DRIFT = 0.05
"""Sizes and times that differ by more than this share are not those that were planned for."""
RECORDED_STEPS = 2
"""What is saved, and where in a layer."""
TIMED_STEPS = 3
"""How long that takes where nobody looks, and nothing is copied beside it: the median of an odd number."""
MAX_RECORDED_STEPS = 16
"""So many are recorded while none is as large as the step for which it was begun: lengths may change every step. Steps
that come more rarely are not planned for: what they would keep is swapped."""
SETTLING_STEPS = 1
"""After a switch the engine learns the order and sizes of what it moves: such a step is not judged."""
PATIENCE_SMALLER = 3
"""Steps in a row with less to save before the plan follows: a plan for more fits, and lengths may alternate. Doubled
each time that something new has to be measured for it, or that more comes back soon."""
SOON = 4
"""Times that patience, in steps."""
PATIENCE_RARE = 1
"""Larger steps close to each other before they are planned for; doubled each time that none came while recording."""
PATIENCE_SLOWER = 20
"""Steps in a row that took too long before all is measured again; doubled each time."""
MAX_TIGHTENINGS = 3
"""How often a workload gets a smaller budget because measured peaks were above the real one."""


class Stage(Enum):
    PROFILE = "profile"
    SEARCH = "search"
    STABLE = "stable"


@dataclass(frozen=True)
class Step:
    """A training step as it was measured, the worst of all ranks.

    Attributes:
        ms: ``None`` where it is not known yet.
        peak_gib: most memory that the device had to hold in it.
        num_tensors, saved_mib: what the largest micro-batch saved.
        num_micro_batches: that the step had.
        full_gib: the device was full below its budget: so much less is tried.
    """

    number: int
    ms: float | None
    peak_gib: float
    num_tensors: float
    saved_mib: float
    num_micro_batches: int
    full_gib: float = 0.0

    def over_gib(self, budget_gib: float) -> float:
        """So much more than there is was held; below 0: so much less."""
        return max(self.peak_gib - budget_gib, self.full_gib or -math.inf)


@dataclass(eq=False)
class Workload:
    """Steps that save alike, and the plan for them.

    Attributes:
        fewest_tensors, most_tensors: that steps saved while it was recorded.
        saved_mib: most that one of them saved.
        measured: what whoever makes the plans has measured of it; nothing to the stages.
        spare_gib: the solver gets so much less than the budget, because measured peaks were above it ...
        num_tightened: ... so many times.
    """

    fewest_tensors: float
    most_tensors: float
    saved_mib: float
    num_micro_batches: int
    best: Plan | None = None
    best_ms: float | None = None
    measured: Any = None
    spare_gib: float = 0.0
    num_tightened: int = 0

    def include(self, step: Step) -> None:
        """It was recorded as well."""
        self.fewest_tensors = min(self.fewest_tensors, step.num_tensors)
        self.most_tensors = max(self.most_tensors, step.num_tensors)
        self.saved_mib = max(self.saved_mib, step.saved_mib)

    def has_sites_of(self, step: Step) -> bool:
        """Whether the same tensors are saved, but for experts that get no token, say; and as often: a pipeline holds
        more micro-batches at once where there are more."""
        is_as_many = step.num_micro_batches == self.num_micro_batches
        return is_as_many and (1 - DRIFT) * self.fewest_tensors <= step.num_tensors <= (1 + DRIFT) * self.most_tensors

    def is_like(self, step: Step) -> bool:
        return self.has_sites_of(step) and abs(step.saved_mib - self.saved_mib) <= DRIFT * self.saved_mib

    def covers(self, step: Step) -> bool:
        """Whether its plan keeps ``step`` below the budget as well: the same sites, and no more bytes."""
        return self.has_sites_of(step) and step.saved_mib <= (1 + DRIFT) * self.saved_mib


@dataclass(frozen=True)
class Entered:
    """A stage, from a step on; ``predicted_peak_gib``: most that one of its plans is predicted to hold."""

    first_step: int
    stage: Stage
    note: str
    predicted_peak_gib: float | None


@dataclass(frozen=True)
class Tried:
    """A candidate of a search and how it did; ``over_gib``: see ``Step``."""

    plan: Plan
    ms: float
    peak_gib: float
    over_gib: float


class Stages:
    """Decides at the end of each step.

    Args:
        budget_gib: most memory that the device may hold.
        make_plans: plans for a workload, the best first, that the cost model puts below the given GiB. The first time
            that workload has just been recorded. Called on all ranks alike. Raises ``Infeasible``.
        max_candidates: plans that are tried.
        say: told of every change of stage, for people.
        keeps_time: steps that have become slower mean something.
        most_telling: steps with so many micro-batches hold as much as those with more.
        settling_steps: of a candidate that are not judged.

    Attributes:
        plan: what the next step follows; ``None``: the safe plan, which holds as little as it can.
        recording: whether the next step is recorded.
        timing: whether it is timed, or comes before those that are.
        num_replans: times that another plan was made or taken up after the first.
        num_infeasible: workloads for which no plan was found that stays below the budget.
        history: the stages that were entered.
    """

    def __init__(
        self,
        budget_gib: float,
        make_plans: Callable[[Workload, float], Sequence[Plan]],
        max_candidates: int,
        say: Callable[[str], None],
        keeps_time: bool = True,
        most_telling: int = sys.maxsize,
        settling_steps: int = SETTLING_STEPS,
    ) -> None:
        self.stage = Stage.PROFILE
        self.plan: Plan | None = None
        self.recording = self.timing = False
        self.num_replans = self.num_infeasible = 0
        self.history: list[Entered] = []
        self._budget_gib = budget_gib
        self._make_plans = make_plans
        self._max_candidates = max_candidates
        self._say = say
        self._workloads: list[Workload] = []
        self._current: Workload | None = None
        self._candidates: list[Plan] = []
        self._tried: list[Tried] = []
        self._num_in_stage = self._num_timed = self._num_micro_batches = 0
        self._num_smaller = self._num_slower = 0
        self._keeps_time = keeps_time
        self._most_telling = most_telling
        self._settling_steps = settling_steps
        self._patience_smaller = PATIENCE_SMALLER
        self._patience_slower = PATIENCE_SLOWER
        self._reach_mib = self._rare_mib = 0.0
        self._num_rare = self._rare_at = 0
        self._patience_rare = PATIENCE_RARE
        self._smaller_at: int | None = None

    @property
    def expected(self) -> Workload | None:
        """What the plan in force was made for."""
        return self._current if self.plan is not None else None

    @property
    def num_steps_needed(self) -> int:
        """Steps until a plan stands, at most, where steps stay as they are and the first plans fit."""
        num_profiled = SETTLING_STEPS + RECORDED_STEPS + SETTLING_STEPS + TIMED_STEPS
        return num_profiled + self._max_candidates * (self._settling_steps + 1)

    @property
    def has_been_stable(self) -> bool:
        return any(one.stage is Stage.STABLE for one in self.history)

    def step_ended(self, step: Step) -> None:
        """Decide about the next step.

        Raises:
            Infeasible: no plan fits the budget, and none was made before.
        """
        if not self.history:
            self.history.append(Entered(step.number, Stage.PROFILE, "the plan that holds least", None))
        if step.num_micro_batches != self._num_micro_batches:
            self._num_micro_batches = step.num_micro_batches
            for workload in (*self._workloads, *([self._current] if self._current is not None else [])):
                workload.best_ms = None  # steps take another time now
            if self.stage is Stage.SEARCH:
                self._candidates += [tried.plan for tried in self._tried]
                self._tried = []
        step = replace(step, num_micro_batches=min(step.num_micro_batches, self._most_telling))
        self._num_in_stage += 1
        if self.timing:
            self._time(step)
        elif self.stage is Stage.PROFILE:
            self._profile(step)
        elif self.stage is Stage.SEARCH:
            self._search(step)
        else:
            self._watch(step)

    # ------------------------------------------------------------------ profile

    def _profile(self, step: Step) -> None:
        if self._num_in_stage <= SETTLING_STEPS:
            self.recording = True
            over_gib = step.peak_gib - self._budget_gib
            if over_gib > 0:
                over = format_bytes(over_gib * GIB)
                self._say(
                    f"the peak is {over} above the budget while steps are measured: a plan below it follows, or the "
                    "smallest budget that would do"
                )
            return
        if self._current is None:
            self._current = Workload(step.num_tensors, step.num_tensors, step.saved_mib, step.num_micro_batches)
        elif self._current.num_micro_batches != step.num_micro_batches:
            self._begin_profile(step, "the number of micro-batches changed while steps were recorded")
            return
        self._current.include(step)
        num_recorded = self._num_in_stage - SETTLING_STEPS
        is_reached = self._reach_mib <= (1 + DRIFT) * self._current.saved_mib
        if num_recorded < (RECORDED_STEPS if is_reached else MAX_RECORDED_STEPS):
            return
        self.recording = False
        known = None
        if not is_reached:
            self._rare_mib, self._num_rare = max(self._rare_mib, self._reach_mib), 0
            self._patience_rare *= 2
            known = self._known(replace(step, saved_mib=self._current.saved_mib))
        if known is not None:
            self._take_up(step, known, f"micro-batches that save {self._reach_mib:,.1f} MiB are too rare to plan for")
        else:
            self.timing = True
            self._num_in_stage = self._num_timed = 0

    def _time(self, step: Step) -> None:
        """Steps of another size tell nothing of the time that those take which were recorded."""
        assert self._current is not None
        if self._num_in_stage <= SETTLING_STEPS:
            return
        self._num_timed += self._current.is_like(step)
        if self._num_timed >= TIMED_STEPS or self._num_in_stage >= SETTLING_STEPS + MAX_RECORDED_STEPS:
            self.timing = False
            self._begin_search(step, self._plans_of(self._current))

    def _begin_profile(self, step: Step, why: str) -> None:
        self.plan = None
        self.recording = False
        self._current = None
        self._reach_mib = step.saved_mib
        self._enter(step.number + 1, Stage.PROFILE, why)

    # ------------------------------------------------------------------- search

    def _plans_of(self, recorded: Workload) -> Sequence[Plan]:
        """Where none fits: those that hold least, unless it is the first to be planned. Ending would lose what was
        trained."""
        try:
            return self._make_plans(recorded, self._budget_gib)
        except Infeasible as error:
            if self.num_replans == 0:
                raise
            self.num_infeasible += 1
            recorded.num_tightened = MAX_TIGHTENINGS + 1  # less than the least there is not
            smallest = f"{error.smallest_gib:.10g} GiB"
            self._say(f"no plan keeps such steps below the budget ({smallest} would do): by those that hold least")
            return self._make_plans(recorded, error.smallest_gib)

    def _begin_search(self, step: Step, plans: Sequence[Plan]) -> None:
        self._candidates = list(plans)[: self._max_candidates]
        self._tried = []
        if len(self._candidates) == 1 and not moves(self._candidates[0]):
            note = f"the budget is above the need: nothing is swapped{_at_rest(self._candidates[0])}"
            self._settle(step, self._candidates[0], None, note)
            return
        note = f"plans to try: {len(self._candidates)}"
        peak_gib = _most_predicted(self._candidates)
        if peak_gib is not None:
            note += f" (predicted to hold {format_bytes(peak_gib * GIB)} at most)"
        self._enter(step.number + 1, Stage.SEARCH, note, peak_gib)
        self.plan = self._candidates.pop(0)

    def _search(self, step: Step) -> None:
        assert self._current is not None
        assert self.plan is not None
        if self._has_changed(step):
            self._follow_change(step)
            return
        if not self._current.is_like(step) or self._num_in_stage <= self._settling_steps or step.ms is None:
            return
        self._tried.append(Tried(self.plan, step.ms, step.peak_gib, step.over_gib(self._budget_gib)))
        self._num_in_stage = 0
        if self._candidates:
            self.plan = self._candidates.pop(0)
            return
        fitting = [tried for tried in self._tried if tried.over_gib <= 0]
        if fitting:
            best = min(fitting, key=lambda tried: tried.ms)
            self._settle(step, best.plan, best.ms, _described(best, self._tried.index(best) + 1, len(self._tried)))
        else:
            self._tighten(step, min(self._tried, key=lambda tried: (tried.over_gib, tried.peak_gib)))

    def _settle(self, step: Step, plan: Plan, ms: float | None, note: str) -> None:
        assert self._current is not None
        self.plan = self._current.best = plan
        self._current.best_ms = ms
        if self._current not in self._workloads:
            self._workloads.append(self._current)
        self._num_smaller = self._num_slower = 0
        self._enter(step.number + 1, Stage.STABLE, note, _most_predicted([plan]))

    def _tighten(self, step: Step, lowest: Tried) -> None:
        """Even the lowest measured peak is above the budget: the solver gets less, by what it was wrong or more.

        Where that leads to nothing training goes on by this plan: it runs, and ending it would lose what was trained.
        """
        current = self._current
        assert current is not None
        over_gib = lowest.over_gib
        wrong_gib = over_gib if lowest.plan.predicted is None else lowest.peak_gib - lowest.plan.predicted.peak_gib
        over = format_bytes(over_gib * GIB)
        where = f"{over} above the budget" if lowest.peak_gib > self._budget_gib else "at all that the device has"
        current.num_tightened += 1
        if current.num_tightened <= MAX_TIGHTENINGS:
            current.spare_gib = max(current.spare_gib + over_gib, wrong_gib)
            spare = format_bytes(current.spare_gib * GIB)
            self._say(f"the peak was {where}: planned again with {spare} to spare")
            self.num_replans += 1
            try:
                plans = self._make_plans(current, self._budget_gib - current.spare_gib)
            except Infeasible:
                current.num_tightened = MAX_TIGHTENINGS + 1
            else:
                self._begin_search(step, plans)
                return
        note = f"no plan was found that does better: the peak stays {where}"
        self._settle(step, lowest.plan, None, note)

    # ------------------------------------------------------------------- stable

    def _watch(self, step: Step) -> None:
        assert self._current is not None
        current = self._current
        if self._has_changed(step):
            self._follow_change(step)
            return
        if not current.is_like(step) or self._num_in_stage <= SETTLING_STEPS:
            return
        over_gib = step.over_gib(self._budget_gib)
        if over_gib > 0 and current.num_tightened <= MAX_TIGHTENINGS:
            assert self.plan is not None
            self._tighten(step, Tried(self.plan, step.ms or 0.0, step.peak_gib, over_gib))
            return
        if current.best_ms is None:
            current.best_ms = step.ms
            return
        slow = self._keeps_time and step.ms is not None and step.ms > (1 + DRIFT) * current.best_ms
        self._num_slower = self._num_slower + 1 if slow else 0
        if self._num_slower >= self._patience_slower:
            self._patience_slower *= 2
            self._workloads.remove(current)
            self.num_replans += 1
            self._begin_profile(step, f"steps take {step.ms:.0f} ms instead of {current.best_ms:.0f}")

    def _has_changed(self, step: Step) -> bool:
        """Whether the plan no longer goes with what is saved: at once if that is more, with patience if it is less."""
        assert self._current is not None
        if self._current.is_like(step):
            self._num_smaller = 0
            return False
        if not self._current.covers(step):
            return not self._is_rare(step)
        self._num_smaller += 1
        return self._num_smaller >= self._patience_smaller

    def _is_rare(self, step: Step) -> bool:
        """Whether steps as large were waited for in vain, and there are not many now."""
        assert self._current is not None
        is_within = self._current.has_sites_of(step) and step.saved_mib <= (1 + DRIFT) * self._rare_mib
        if not is_within or self._known(step) is not None:
            return False
        is_far = step.number - self._rare_at > MAX_RECORDED_STEPS
        self._num_rare, self._rare_at = (0 if is_far else self._num_rare) + 1, step.number
        return self._num_rare < self._patience_rare

    def _follow_change(self, step: Step) -> None:
        """Another workload: its plan, if there is one, else it is measured."""
        assert self._current is not None
        before, self._num_smaller = self._current, 0
        self.num_replans += 1
        if before.covers(step):
            self._smaller_at = step.number
        elif self._smaller_at is not None and step.number - self._smaller_at <= SOON * self._patience_smaller:
            self._patience_smaller *= 2
            self._smaller_at = None
        what = f"micro-batches save {step.saved_mib:,.1f} MiB each, not {before.saved_mib:,.1f}"
        if step.num_micro_batches != before.num_micro_batches:
            what = f"steps have {step.num_micro_batches} micro-batches, not {before.num_micro_batches}"
        elif not before.has_sites_of(step):
            what = "other tensors are saved than before"
        known = self._known(step)
        if known is not None:
            self._take_up(step, known, what)
            return
        if before.covers(step):
            self._patience_smaller *= 2
        self._begin_profile(step, what)

    def _known(self, step: Step) -> Workload | None:
        """The workload with a plan that is nearest to ``step``."""
        alike = [one for one in self._workloads if one.is_like(step)]
        return min(alike, key=lambda one: abs(one.saved_mib - step.saved_mib), default=None)

    def _take_up(self, step: Step, known: Workload, why: str) -> None:
        assert known.best is not None
        self._current = known
        self._settle(step, known.best, known.best_ms, f"{why}: the plan is known")

    def _enter(self, number: int, stage: Stage, note: str, predicted_peak_gib: float | None = None) -> None:
        self.stage = stage
        self._num_in_stage = 0
        self.history.append(Entered(number, stage, note, predicted_peak_gib))
        self._say(f"{stage.value} from step {number}: {note}")


def _most_predicted(plans: Sequence[Plan]) -> float | None:
    return max((plan.predicted.peak_gib for plan in plans if plan.predicted is not None), default=None)


def moves(plan: Plan) -> bool:
    """Whether ``plan`` swaps or recomputes anything."""
    return any(
        entry.sections or any(site.action != "keep" for site in entry.sites.values()) for entry in plan.classes
    )


def _described(tried: Tried, place: int, number: int) -> str:
    predicted = tried.plan.predicted
    text = f"plan {place} of {number}, {_figures(tried.ms, tried.peak_gib)}"
    if predicted is not None:
        text += f" (predicted {_figures(predicted.step_ms, predicted.peak_gib)})"
    return text + _at_rest(tried.plan)


def _at_rest(plan: Plan) -> str:
    return "" if plan.resting is None else f"; {plan.resting:.0%} of the optimizer's state rests"


def _figures(ms: float, gib: float) -> str:
    return f"{ms:,.1f} ms and {format_bytes(gib * GIB)}"
