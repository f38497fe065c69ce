"""Steps of a run that plans itself, made up: what each plan takes and holds, and what steps save."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.swap.plan import Plan, PlanClass, Predicted, SitePlan
from megatron.swap.stages import RECORDED_STEPS, SETTLING_STEPS, TIMED_STEPS, Stage, Stages, Step, Workload
from tests.unit.planner.cases import model

BUDGET_GIB = 10.0


def a_plan(name: str, action: str = "swap", peak_gib: float = 9.0) -> Plan:
    return Plan(model(8), BUDGET_GIB, None, Predicted(peak_gib, 100.0, 99.0, 1.0), (PlanClass("0", {f"{name}/0": SitePlan(action)}),))  # type: ignore[arg-type]  # noqa: E501


RECORDED = SETTLING_STEPS + RECORDED_STEPS
PROFILED = RECORDED + SETTLING_STEPS + TIMED_STEPS


class Run:
    """Steps of a run: ``ms`` and ``peak_gib`` by plan, what is saved as set; with ``full`` plans the device is full."""

    def __init__(self, plans: Sequence[Plan], ms: Sequence[float], peaks: Sequence[float]) -> None:
        self.plans = list(plans)
        self.ms = {id(plan): value for plan, value in zip(plans, ms, strict=True)}
        self.peaks = {id(plan): value for plan, value in zip(plans, peaks, strict=True)}
        self.budgets: list[float] = []
        self.asked: list[Workload] = []
        self.said: list[str] = []
        self.recorded: list[int] = []
        self.timed: list[int] = []
        self.number = 0
        self.num_tensors, self.saved_mib = 100.0, 1000.0
        self.num_micro_batches = 2
        self.full: list[Plan] = []
        self.stages = Stages(BUDGET_GIB, self.make_plans, 3, self.said.append)

    def make_plans(self, workload: Workload, budget_gib: float) -> Sequence[Plan]:
        self.asked.append(workload)
        self.budgets.append(budget_gib)
        return self.plans

    def steps(self, number: int, slower: float = 1.0) -> list[Stage]:
        seen = []
        for _ in range(number):
            self.number += 1
            seen.append(self.stages.stage)
            if self.stages.recording:
                self.recorded.append(self.number)
            if self.stages.timing:
                self.timed.append(self.number)
            plan = self.stages.plan
            ms, peak = (200.0, 5.0) if plan is None else (self.ms[id(plan)], self.peaks[id(plan)])
            saved = self.num_tensors, self.saved_mib, self.num_micro_batches
            full_gib = 0.5 if any(plan is one for one in self.full) else 0.0
            self.stages.step_ended(Step(self.number, ms * slower, peak, *saved, full_gib))
        return seen


def until_stable(run: Run) -> int:
    for _ in range(40):
        if run.stages.stage is Stage.STABLE:
            return run.number
        run.steps(1)
    raise AssertionError(run.said)


def three(ms: Sequence[float] = (110.0, 105.0, 120.0), peaks: Sequence[float] = (9.0, 9.5, 9.0)) -> Run:
    return Run([a_plan("a"), a_plan("b"), a_plan("c")], ms, peaks)
