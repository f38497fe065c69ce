"""Made-up steps of a run that plans itself: the time and memory of each plan, and what steps save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron.swap.common.plan import Plan, PlanClass, Predicted, SitePlan
from megatron.swap.planning.state_machine import (
    RECORDED_STEPS,
    SETTLING_STEPS,
    TIMED_STEPS,
    Measurement,
    SearchLimits,
    Stage,
    StateMachine,
    Transition,
)
from megatron.swap.planning.workload import Step, Workload
from tests.unit.planner.cases import model

BUDGET_GIB = 10.0


def a_plan(name: str, action: str = "swap", peak_gib: float = 9.0, ms: float = 100.0) -> Plan:
    return Plan(model(8), BUDGET_GIB, None, Predicted(peak_gib, ms, 0.99 * ms, 1.0), (PlanClass("0", {f"{name}/0": SitePlan(action)}),))  # type: ignore[arg-type]  # noqa: E501


RECORDED = SETTLING_STEPS + RECORDED_STEPS
PROFILED = RECORDED + SETTLING_STEPS + TIMED_STEPS
LIMITS = SearchLimits(BUDGET_GIB, max_candidates=3)


class Run:
    """Steps of a run: ``ms`` and ``peak_gib`` by plan, saved bytes as set. With ``full`` plans the device is full.

    Args:
        plans: what the solver returns; ``ms`` and ``peaks`` are measured of each.
        make_plans: solves instead, called with the run.
        widen: solves for memory that was left free, called with the run and the memory to leave free; by default there
            is nothing better.
        limits: as in ``SearchLimits``, where they differ from ``LIMITS``.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        ms: Sequence[float],
        peaks: Sequence[float],
        make_plans: Callable[[Run, Workload, float], Sequence[Plan]] | None = None,
        widen: Callable[[Run, float], Sequence[Plan]] | None = None,
        **limits: Any,
    ) -> None:
        self.plans = list(plans)
        self.ms = {id(plan): value for plan, value in zip(plans, ms, strict=True)}
        self.peaks = {id(plan): value for plan, value in zip(plans, peaks, strict=True)}
        self.budgets: list[float] = []
        self.reserves: list[float] = []
        self.asked: list[Workload] = []
        self.said: list[str] = []
        self.recorded: list[int] = []
        self.timed: list[int] = []
        self.transitions: list[Transition] = []
        self.number = 0
        self.num_tensors, self.saved_mib = 100.0, 1000.0
        self.num_micro_batches = 2
        self.full: list[Plan] = []

        def solve(workload: Workload, budget_gib: float, reserve_gib: float | None) -> Sequence[Plan]:
            if reserve_gib is not None:
                self.reserves.append(reserve_gib)
                return (widen or Run.widen)(self, reserve_gib)
            return (make_plans or Run.make_plans)(self, workload, budget_gib)

        self.machine = StateMachine(replace(LIMITS, **limits), solve)

    def make_plans(self, workload: Workload, budget_gib: float) -> Sequence[Plan]:
        self.asked.append(workload)
        self.budgets.append(budget_gib)
        return self.plans

    def widen(self, reserve_gib: float) -> Sequence[Plan]:
        return self.plans

    def add(self, plan: Plan, ms: float, peak_gib: float) -> Plan:
        self.ms[id(plan)], self.peaks[id(plan)] = ms, peak_gib
        return plan

    def step(self, step: Step) -> None:
        before = self.machine.plan
        transition = self.machine.step_ended(step)
        assert (transition.stage, transition.plan) == (self.machine.stage, self.machine.plan)
        assert transition.is_new_plan or transition.plan is before
        self.transitions.append(transition)
        self.said += transition.lines
        if transition.measurement is Measurement.RECORD:
            self.recorded.append(step.number + 1)
        if transition.measurement is Measurement.TIME:
            self.timed.append(step.number + 1)

    def steps(self, number: int, slower: float = 1.0) -> list[Stage]:
        """Run ``number`` steps that take ``slower`` times as long; return their stages."""
        seen = []
        for _ in range(number):
            self.number += 1
            seen.append(self.machine.stage)
            plan = self.machine.plan
            ms, peak = (200.0, 5.0) if plan is None else (self.ms[id(plan)], self.peaks[id(plan)])
            saved = self.num_tensors, self.saved_mib, self.num_micro_batches
            full_gib = 0.5 if any(plan is one for one in self.full) else 0.0
            self.step(Step(self.number, ms * slower, peak, *saved, full_gib))
        return seen


    def at(self, saved_mib: float, number: int = 1) -> Stage:
        self.saved_mib = saved_mib
        self.steps(number)
        return self.machine.stage

    @property
    def planned_mib(self) -> float | None:
        return None if self.machine.planned is None else self.machine.planned.saved_mib


def until_stable(run: Run) -> int:
    for _ in range(40):
        if run.machine.stage is Stage.STABLE:
            return run.number
        run.steps(1)
    raise AssertionError(run.said)


def three(
    ms: Sequence[float] = (110.0, 105.0, 120.0), peaks: Sequence[float] = (9.0, 9.5, 9.0), **options: Any
) -> Run:
    return Run([a_plan("a"), a_plan("b"), a_plan("c")], ms, peaks, **options)


def stable(**options: Any) -> Run:
    run = three(**options)
    until_stable(run)
    return run
