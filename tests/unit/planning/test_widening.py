"""Memory that the fastest plan left free is used by further plans, with made-up steps."""

from collections.abc import Sequence

import pytest

from megatron.swap.common.plan import Infeasible, Plan
from tests.staged_run import PROFILED, Run, a_plan, stable, three, until_stable


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
    assert [entry.predicted_peak_gib for entry in run.machine.history[-2:]] == [10.75, 10.75]


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


def test_memory_stays_free_if_nothing_faster_fits_into_it() -> None:
    def infeasible(_: Run, reserve_gib: float) -> Sequence[Plan]:
        raise Infeasible(f"no plan leaves {reserve_gib}", 9.5)

    for widen in (infeasible, lambda *_: [], lambda *_: [a_plan("wide", ms=99.95)]):
        run = three(peaks=(8.0, 8.0, 8.0), widen=widen)
        assert until_stable(run) == PROFILED + 6
        assert len(run.reserves) == 1
        assert run.machine.plan is run.plans[1]


def test_no_further_plan_is_made() -> None:
    for peak_gib, most in ((8.0, 1), (10.0, 3)):  # one candidate; nothing is free
        assert stable(peaks=(peak_gib,) * 3, max_candidates=most).reserves == []
