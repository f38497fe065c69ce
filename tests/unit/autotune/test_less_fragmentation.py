"""Plans that are predicted not to fit, but would with less fragmentation than was measured, are tried."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron.swap.autotune.state_machine import Stage
from megatron.swap.autotune.workload import Workload
from megatron.swap.common.plan import Infeasible, Plan
from tests.staged_run import PROFILED, Run, three, until_stable


def none_is_predicted_to_fit(run: Run, workload: Workload, budget_gib: float) -> Sequence[Plan]:
    """Refuse the first workload: 12 GiB would do, of which 2.5 allow for fragmentation."""
    plans = run.make_plans(workload, budget_gib)
    if len(set(map(id, run.asked))) == 1 and budget_gib < 12.0:
        raise Infeasible(f"no plan stays below {budget_gib}", 12.0, 2.5)
    return plans


def test_the_one_that_fits_is_kept() -> None:
    run = three(peaks=(11.0, 9.75, 12.0), make_plans=none_is_predicted_to_fit)
    until_stable(run)
    assert run.budgets[:2] == [10.0, 12.0]
    assert run.machine.plan is run.plans[1]
    assert any("predicted to hold 12 GiB at least, and may hold less" in line for line in run.said)


def test_if_none_fits_the_run_ends_as_if_none_had_been_tried() -> None:
    run = three(peaks=(11.0, 10.25, 12.0), make_plans=none_is_predicted_to_fit)
    with pytest.raises(Infeasible, match=r"no plan stays below 10\.0"):
        until_stable(run)


def test_another_workload_does_not_end_with_that_error() -> None:
    run = three(peaks=(11.0, 10.25, 12.0), make_plans=none_is_predicted_to_fit)
    run.steps(PROFILED + 1)
    run.saved_mib = 500.0
    until_stable(run)
    assert run.machine.stage is Stage.STABLE
    assert "above the budget" in run.said[-1]
