"""Memory that the fastest plan left free is used by further plans, with made-up steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.swap.common.plan import Infeasible, Plan
from megatron.swap.planning.search import CandidateSearch
from megatron.swap.planning.state_machine import Stage
from megatron.swap.planning.workload import Workload
from tests.staged_run import BUDGET_GIB, PROFILED, Run, a_plan, stable, three, until_stable


def test_memory_that_the_fastest_plan_left_free_is_used() -> None:
    """Predicted peaks grow by half of what is free: from 9.0 GiB, of which 8.0 were held, to 10.0, 10.5, 10.75."""
    wide = [a_plan(f"wide{i}", peak_gib=peak_gib, ms=90.0 - i) for i, peak_gib in enumerate((10.0, 10.5, 10.75))]
    run = three(peaks=(8.0, 8.0, 8.5), widen=lambda run, _: [wide[len(run.reserves) - 1]])
    for i, plan in enumerate(wide):
        run.add(plan, 95.0 - i, 9.0 + 0.25 * i)
    run.peaks[id(wide[1])] = 9.5
    assert until_stable(run) == run.machine.num_steps_needed
    assert run.reserves == [0.0, -0.5, -0.75]
    assert run.machine.plan is wide[2]
    assert "the best plan left 2.00 GiB of the budget free: one more plan to try" in run.said
    assert "plan 6 of 6, 93.0 ms" in run.said[-1]
    assert run.machine.num_replans == 0


def test_after_a_plan_for_free_memory_that_exceeds_the_budget_half_as_much_is_tried() -> None:
    wide = [a_plan("wide", peak_gib=9.75, ms=90.0), a_plan("narrower", peak_gib=9.25, ms=95.0)]
    run = three(peaks=(8.0, 8.0, 8.0), widen=lambda run, _: wide[len(run.reserves) - 1 :][:1])
    run.add(wide[0], 85.0, 10.1)
    run.add(wide[1], 97.0, 9.9)
    until_stable(run)
    assert run.reserves == [0.0, 10.0 - (9.0 + 9.75) / 2, pytest.approx(10.0 - (9.25 + 9.35) / 2)]
    assert run.machine.plan is wide[1]


@pytest.mark.parametrize(("ms", "peak_gib"), [(112.0, 9.0), (90.0, 10.1)])
def test_a_plan_for_free_memory_that_is_slower_or_too_large_is_not_taken(ms: float, peak_gib: float) -> None:
    wide = a_plan("wide", peak_gib=9.5, ms=90.0)
    run = three(peaks=(8.0, 8.0, 8.0), widen=lambda run, _: [wide])
    run.add(wide, ms, peak_gib)
    until_stable(run)
    assert run.machine.plan is run.plans[1]
    assert run.number == PROFILED + 8  # it ran once: the second time nothing new was offered


@pytest.mark.parametrize(("ms", "chosen"), [((104.0, 102.0, 103.0), 0), ((110.0, 102.0, 103.0), 2)])
def test_of_plans_whose_steps_take_about_as_long_the_prediction_decides(ms: Sequence[float], chosen: int) -> None:
    """One step's time varies by more than such plans differ."""
    plans = [a_plan("a", ms=90.0), a_plan("b", ms=92.0), a_plan("c", ms=91.0)]
    run = Run(plans, ms, (9.0, 9.0, 9.0))
    until_stable(run)
    assert run.machine.plan is plans[chosen]


def test_a_plan_that_exceeded_the_budget_as_a_candidate_is_not_tried_again() -> None:
    run = three(peaks=(10.2, 8.0, 8.0), widen=lambda run, _: run.plans[:1])
    until_stable(run)
    assert run.number == PROFILED + 6
    assert run.machine.plan is run.plans[1]


def test_what_was_chosen_stays_chosen_while_further_plans_are_tried() -> None:
    wide = a_plan("wide", peak_gib=10.1, ms=90.0)
    run = three(peaks=(8.0, 8.0, 8.0), widen=lambda run, _: [wide])
    run.add(wide, 95.0, 10.5)
    run.steps(PROFILED + 5)
    assert run.machine.best_plan is run.machine.plan is run.plans[2]
    run.steps(1)
    assert (run.machine.plan, run.machine.stage) == (wide, Stage.SEARCH)
    assert run.machine.best_plan is run.plans[1]
    assert run.machine.history[-1].predicted_peak_gib == 10.1  # of all plans of the search
    run.num_tensors, run.saved_mib = 150.0, 3000.0  # another workload
    run.steps(1)
    assert run.machine.stage is Stage.PROFILE
    until_stable(run)
    run.num_tensors, run.saved_mib = 100.0, 1000.0  # the first again: its plan is known
    run.steps(1)
    assert (run.machine.plan, run.machine.stage) == (run.plans[1], Stage.STABLE)
    assert sum(entry.stage is Stage.PROFILE for entry in run.machine.history) == 2


def test_memory_stays_free_if_nothing_faster_fits_into_it() -> None:
    def infeasible(_: Run, reserve_gib: float) -> Sequence[Plan]:
        raise Infeasible(f"no plan leaves {reserve_gib}", 9.5)

    for widen in (infeasible, lambda *_: [], lambda *_: [a_plan("wide", ms=99.95)]):
        run = three(peaks=(8.0, 8.0, 8.0), widen=widen)
        assert until_stable(run) == PROFILED + 6
        assert len(run.reserves) == 1
        assert run.machine.plan is run.plans[1]


def test_memory_is_used_as_well_after_peaks_were_too_high() -> None:
    """At 9.0 GiB predicted 10.5 were held, so the solver gets 1.5 less. Of a plan for 8.0, 9.2 are held."""
    lower = a_plan("lower", peak_gib=8.0, ms=110.0)
    wide = [a_plan("wide", peak_gib=8.4, ms=105.0), a_plan("wider", peak_gib=8.5, ms=100.0)]

    def plans(run: Run, workload: Workload, budget_gib: float) -> Sequence[Plan]:
        made = run.make_plans(workload, budget_gib)
        return made if budget_gib == BUDGET_GIB else [lower]

    run = three(peaks=(10.5, 10.5, 10.5), make_plans=plans, widen=lambda run, _: wide[len(run.reserves) - 1 :][:1])
    run.add(lower, 110.0, 9.2)
    run.add(wide[0], 105.0, 9.6)
    run.add(wide[1], 100.0, 10.1)
    until_stable(run)
    assert run.budgets == [10.0, 8.5]
    # Halfway from 8.0 to the 8.8 that would use up the budget; from 8.4 to 8.8; from 8.4 to the 8.5 that were too high.
    assert run.reserves == [pytest.approx(8.5 - wider_gib) for wider_gib in (8.4, 8.6, 8.45)]
    assert run.machine.plan is wide[0]


def test_what_proved_too_high_before_is_not_tried_again() -> None:
    search = CandidateSearch([a_plan("a")], too_high_gib=9.0)
    assert search.wider_gib(8.0, 4.0) == 8.5
    assert search.wider_gib(8.0, 0.5) == 8.25
    assert search.wider_gib(9.5, 0.5) == 9.75  # a lower plan was too high, and yet this one fits


def test_no_further_plan_is_made() -> None:
    for peak_gib, most in ((8.0, 1), (10.0, 3)):  # one candidate; nothing is free
        assert stable(peaks=(peak_gib,) * 3, max_candidates=most).reserves == []
