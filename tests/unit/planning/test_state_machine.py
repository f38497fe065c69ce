"""The stages of a run that plans itself, with made-up steps."""

from collections.abc import Sequence

import pytest

from megatron.swap.common.plan import Infeasible, Plan
from megatron.swap.planning.change_detector import OTHER_TENSORS, PATIENCE_SLOWER, PATIENCE_SMALLER
from megatron.swap.planning.state_machine import SETTLING_STEPS, Stage, Transition
from megatron.swap.planning.workload import Step, Workload
from tests.staged_run import BUDGET_GIB, PROFILED, Run, a_plan, stable, three, until_stable


class TestFirstPlan:

    def test_profile_then_search_then_the_fastest(self) -> None:
        run = three()
        seen = run.steps(PROFILED + 3 * (SETTLING_STEPS + 1) + 1)
        assert seen == [Stage.PROFILE] * PROFILED + [Stage.SEARCH] * 6 + [Stage.STABLE]
        assert (run.recorded, run.timed) == ([2, 3], [5, 6, 7])
        assert run.machine.plan is run.plans[1]
        assert (run.budgets, run.machine.num_replans) == ([BUDGET_GIB], 0)
        assert "plan 2 of 3, 105.0 ms and 9.50 GiB (predicted 100.0 ms and 9.00 GiB)" in run.said[-1]

    def test_a_plan_above_the_budget_or_with_which_the_device_is_full_loses(self) -> None:
        run = three(peaks=(9.0, 10.1, 9.0))
        until_stable(run)
        assert run.machine.plan is run.plans[0]
        run = three()
        run.full = [run.plans[1]]
        until_stable(run)
        assert run.machine.plan is run.plans[0]
        assert run.budgets == [BUDGET_GIB]

    def test_if_the_device_is_full_with_all_the_solver_gets_so_much_less(self) -> None:
        run = three(peaks=(9.0, 9.0, 9.0))
        run.full = run.plans
        run.steps(PROFILED + 6)
        assert run.budgets == [10.0, 9.5]
        run.full = []
        until_stable(run)
        run.full = run.plans
        run.steps(SETTLING_STEPS + 1)
        assert run.budgets == [10.0, 9.5, 9.0]
        assert run.machine.stage is Stage.SEARCH

    def test_nothing_is_tried_where_nothing_has_to_move(self) -> None:
        run = Run([a_plan("a", "keep")], [100.0], [9.0])
        assert until_stable(run) == PROFILED
        assert run.transitions[-1].is_new_plan, "layers have run whole"
        assert "above the need" in run.said[-1]

    def test_if_all_are_above_the_budget_the_solver_gets_less_by_what_it_was_wrong(self) -> None:
        run = three(peaks=(10.5, 10.25, 11.0))
        run.steps(PROFILED + 6)
        assert run.budgets == [10.0, 8.75]  # 9.0 GiB were predicted
        run.peaks = dict.fromkeys(run.peaks, 9.9)
        until_stable(run)
        assert run.machine.num_replans == 1

    def test_training_goes_on_above_the_budget_where_the_solver_finds_nothing_with_less(self) -> None:
        def fits_once(run: Run, workload: Workload, budget_gib: float) -> Sequence[Plan]:
            if run.budgets:
                raise Infeasible(f"no plan stays below {budget_gib}", 9.5)
            return run.make_plans(workload, budget_gib)

        run = stable(peaks=(10.5, 10.25, 10.5), make_plans=fits_once)
        assert run.machine.plan is run.plans[1]
        assert "stays 256 MiB above the budget" in run.said[-1]
        num_said = len(run.said)
        assert set(run.steps(10)) == {Stage.STABLE}
        assert len(run.said) == num_said

    def test_no_plan_is_an_error_that_reaches_the_user(self) -> None:
        def none_fits(_: Run, __: Workload, budget_gib: float) -> Sequence[Plan]:
            raise Infeasible(f"no plan stays below {budget_gib}", 12.0)

        with pytest.raises(Infeasible, match=r"no plan stays below 10\.0"):
            three(make_plans=none_fits).steps(PROFILED)

    def test_tensors_that_change_all_the_time_are_planned_for_at_once(self) -> None:
        """An example is an expert that gets no token. The recording has the sites of all steps."""
        run = three()
        for number in range(60):
            run.num_tensors = (100.0, 120.0, 90.0)[number % 3]
            run.steps(1)
        assert run.machine.stage is Stage.STABLE
        assert (len(run.asked), run.machine.num_replans) == (1, 0)


def none_is_predicted_to_fit(run: Run, workload: Workload, budget_gib: float) -> Sequence[Plan]:
    """Refuse the first workload: 12 GiB would do, of which 2.5 allow for fragmentation."""
    plans = run.make_plans(workload, budget_gib)
    if len(set(map(id, run.asked))) == 1 and budget_gib < 12.0:
        raise Infeasible(f"no plan stays below {budget_gib}", 12.0, 2.5)
    return plans


class TestLessFragmentationThanWasMeasured:
    """Plans that are predicted not to fit, but would with less of it, are tried."""

    def test_the_one_that_fits_is_kept(self) -> None:
        run = stable(peaks=(11.0, 9.75, 12.0), make_plans=none_is_predicted_to_fit)
        assert run.budgets[:2] == [10.0, 12.0]
        assert run.machine.plan is run.plans[1]
        assert any("predicted to hold 12 GiB at least, and may hold less" in line for line in run.said)

    def test_if_none_fits_the_run_ends_as_if_none_had_been_tried_but_not_another_workload(self) -> None:
        peaks = (11.0, 10.25, 12.0)
        with pytest.raises(Infeasible, match=r"no plan stays below 10\.0"):
            stable(peaks=peaks, make_plans=none_is_predicted_to_fit)
        run = three(peaks=peaks, make_plans=none_is_predicted_to_fit)
        run.steps(PROFILED + 1)
        run.saved_mib = 500.0
        until_stable(run)
        assert "above the budget" in run.said[-1]


class TestNothingFits:
    """A workload of 4000 MiB needs 12 GiB; one of 1000 has its plans."""

    def run(self) -> Run:
        least = a_plan("least")

        def make_plans(run: Run, workload: Workload, budget_gib: float) -> Sequence[Plan]:
            plans = run.make_plans(workload, budget_gib)
            if workload.saved_mib < 4000.0:
                return plans
            if budget_gib < 12.0:
                raise Infeasible(f"no plan stays below {budget_gib}", 12.0)
            return [least]

        run = three(make_plans=make_plans)
        run.ms[id(least)], run.peaks[id(least)] = 300.0, 12.0
        until_stable(run)
        run.saved_mib = 4000.0
        run.steps(1)
        until_stable(run)
        return run

    def test_training_goes_on_by_the_plans_that_hold_least(self) -> None:
        run = self.run()
        assert run.budgets == [10.0, 10.0, 12.0]
        assert run.machine.plan is not None
        assert run.peaks[id(run.machine.plan)] == 12.0
        assert run.machine.num_infeasible == 1
        assert [line for line in run.said if "(12 GiB would do)" in line]
        assert "stays 2.00 GiB above the budget" in run.said[-1]
        num_said = len(run.said)
        assert set(run.steps(50)) == {Stage.STABLE}
        assert (len(run.said), len(run.budgets)) == (num_said, 3), "nothing is said or tried again"

    def test_workloads_that_fit_have_their_plans_and_it_is_known_the_next_time(self) -> None:
        run = self.run()
        least = run.machine.plan
        run.saved_mib = 1000.0
        run.steps(PATIENCE_SMALLER)
        assert run.machine.stage is Stage.STABLE
        assert run.machine.plan in run.plans
        run.steps(20)
        run.saved_mib = 4000.0
        run.steps(1)
        assert run.machine.stage is Stage.STABLE
        assert run.machine.plan is least


class TestChange:
    def test_a_larger_workload_is_measured_at_once_and_known_later(self) -> None:
        run = stable()
        first = run.machine.plan
        assert run.at(2000.0) is Stage.PROFILE
        assert run.transitions[-1] == Transition(
            Stage.PROFILE, None, is_new_plan=True,
            lines=("profile from step 15: micro-batches save 2,000.0 MiB each, not 1,000.0",),
        )  # fmt: skip
        until_stable(run)
        assert run.transitions[-1].is_settled
        assert run.at(1000.0, PATIENCE_SMALLER) is Stage.STABLE
        last = run.transitions[-1]
        assert (last.is_new_plan, last.is_settled) == (False, False), "the same object here, not saved again"
        assert run.machine.plan is first
        assert "the plan is known" in run.said[-1]
        assert run.at(2000.0) is Stage.STABLE
        assert run.machine.num_replans == 3

    def test_what_is_no_change(self) -> None:
        """Single smaller steps, five percent, unknown times, and as many bytes in more or fewer tensors: of packed
        documents, whose number follows chance."""
        run = stable()
        for _ in range(5):
            run.at(500.0, PATIENCE_SMALLER - 1)
            run.at(1000.0)
        run.at(1049.0, 10)
        run.at(951.0, 10)
        run.saved_mib = 1000.0
        for num_tensors in (150.0, 200.0, 80.0, 300.0, 120.0, 102.0) * 20:
            run.num_tensors = num_tensors
            run.steps(1)
        for _ in range(50):
            run.number += 1
            run.step(Step(run.number, None, 9.0, 100.0, 1000.0, 2))
        assert run.machine.num_replans == 0

    @pytest.mark.parametrize("lengths", [[4, 3, 2, 1], [1] * 9 + [4], [2] * 4 + [4] * 4])
    def test_sizes_that_change_all_the_time_come_to_rest(self, lengths: Sequence[int]) -> None:
        """The property holds for any period: in the end only the largest steps have a plan."""
        run = three()
        for length in lengths * 30:
            run.at(1000.0 * length)
        num_replans, num_said = run.machine.num_replans, len(run.said)
        assert num_replans <= 10
        assert {run.at(1000.0 * length) for length in lengths * 10} == {Stage.STABLE}
        assert (run.machine.num_replans, len(run.said)) == (num_replans, num_said)
        assert run.planned_mib == 4000.0

    @pytest.mark.parametrize("lengths", [[1] * 18 + [4], [1] * 40 + [3] + [1] * 40 + [4]])
    def test_sizes_that_come_rarely_are_not_planned_for(self, lengths: Sequence[int]) -> None:
        """Recording until such a step comes would cost more than it gains, each time."""
        run = three()
        for length in lengths * 5:
            run.at(1000.0 * length)
        num_replans = run.machine.num_replans
        assert num_replans <= 2
        assert any("too rare to plan for: the plan is known" in line for line in run.said)
        assert {run.at(1000.0 * length) for length in lengths * 5} == {Stage.STABLE}
        assert run.machine.num_replans == num_replans
        assert run.machine.planned is run.asked[0]

    def test_what_was_rare_is_planned_for_when_it_comes_often(self) -> None:
        run = stable()
        for _ in range(3):
            run.at(4000.0)
            run.at(1000.0, 30)
        assert run.machine.num_replans == 1
        assert run.at(4000.0, 15) is Stage.STABLE
        assert run.planned_mib == 4000.0

    @pytest.mark.parametrize(("saved_mib", "patience"), [(1000.0, OTHER_TENSORS * PATIENCE_SMALLER), (900.0, 1)])
    def test_other_sites_are_another_workload(self, saved_mib: float, patience: int) -> None:
        """At once if they have other bytes; as many bytes stay within the budget for some steps."""
        run = stable()
        run.num_tensors = 90.0
        assert run.at(saved_mib, patience - 1) is Stage.STABLE
        assert run.at(saved_mib) is Stage.PROFILE
        assert "other tensors" in run.said[-1]

    def test_a_peak_above_the_budget_is_planned_again_with_so_much_to_spare(self) -> None:
        run = stable()
        run.steps(5)
        run.peaks[id(run.machine.plan)] = 10.2
        run.steps(1)
        assert run.machine.stage is Stage.SEARCH
        assert run.budgets == [10.0, pytest.approx(8.8)]

    def test_more_micro_batches_are_another_workload(self) -> None:
        run = stable()
        run.num_micro_batches = 4
        run.steps(1)
        assert run.machine.stage is Stage.PROFILE
        assert "steps have 4 micro-batches, not 2" in run.said[-1]

    def test_more_micro_batches_that_hold_no_more_keep_the_plan(self) -> None:
        run = three(most_micro_batches=4)
        run.num_micro_batches = 4
        until_stable(run)
        plan = run.machine.plan
        for number, slower in ((8, 2.0), (64, 16.0), (4, 1.0)):
            run.num_micro_batches = number
            run.steps(2 * PATIENCE_SLOWER, slower)
            assert (run.machine.stage, run.machine.plan) == (Stage.STABLE, plan)
        run.num_micro_batches = 3
        assert run.at(1000.0) is Stage.PROFILE

    def test_slow_steps_are_waited_out_then_measured_again_and_less_often_each_time(self) -> None:
        run = stable()
        run.steps(1)
        run.steps(PATIENCE_SLOWER - 1, slower=1.2)
        run.steps(1)
        assert run.machine.num_replans == 0
        run.steps(PATIENCE_SLOWER, slower=1.2)
        assert (run.machine.stage, run.machine.num_replans) == (Stage.PROFILE, 1)
        until_stable(run)
        run.steps(1)
        run.steps(2 * PATIENCE_SLOWER - 1, slower=1.2)
        assert run.machine.stage is Stage.STABLE
