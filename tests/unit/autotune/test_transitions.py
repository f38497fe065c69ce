"""The decision after a step is one value; what follows from a run of them."""

from __future__ import annotations

from megatron.swap.autotune.change_detector import PATIENCE_SMALLER
from megatron.swap.autotune.state_machine import Measurement, Stage, Transition
from tests.staged_run import Run, a_plan, three, until_stable


def test_one_value_says_all_that_follows_from_a_step() -> None:
    run = Run([a_plan("a"), a_plan("b")], (110.0, 105.0), (9.0, 9.0))
    until_stable(run)
    a, b = run.plans
    profile = [
        Measurement.RECORD, Measurement.RECORD, Measurement.FINISH_RECORDING,
        Measurement.TIME, Measurement.TIME, Measurement.TIME,
    ]  # fmt: skip
    search = "search from step 8: plans to try: 2 (predicted to hold 9.00 GiB at most)"
    chosen = "stable from step 12: plan 2 of 2, 105.0 ms and 9.00 GiB (predicted 100.0 ms and 9.00 GiB)"
    assert run.transitions == [
        *(Transition(Stage.PROFILE, measurement=measurement) for measurement in profile),
        Transition(Stage.SEARCH, a, is_new_plan=True, lines=(search,)),
        Transition(Stage.SEARCH, a),
        Transition(Stage.SEARCH, b, is_new_plan=True),
        Transition(Stage.SEARCH, b),
        Transition(Stage.STABLE, b, is_settled=True, lines=(chosen,)),
    ]


def test_the_plan_is_applied_after_layers_have_run_whole() -> None:
    """The plan is applied even if nothing has to move."""
    run = Run([a_plan("a", "keep")], [100.0], [9.0])
    until_stable(run)
    assert run.transitions[-1].is_new_plan


def test_a_known_plan_is_applied_without_being_saved_again() -> None:
    run = three()
    until_stable(run)
    run.saved_mib = 2000.0
    run.steps(1)
    assert run.transitions[-1] == Transition(
        Stage.PROFILE, None, is_new_plan=True,
        lines=("profile from step 15: micro-batches save 2,000.0 MiB each, not 1,000.0",),
    )  # fmt: skip
    until_stable(run)
    assert run.transitions[-1].is_settled
    run.saved_mib = 1000.0
    run.steps(PATIENCE_SMALLER)
    last = run.transitions[-1]
    assert (last.stage, last.is_new_plan, last.is_settled) == (Stage.STABLE, False, False), "the same object here"


def test_packed_documents_whose_number_follows_chance_are_no_change() -> None:
    """As many bytes in more or fewer tensors, several steps at a time."""
    run = three()
    until_stable(run)
    for num_tensors in (150.0, 200.0, 80.0, 300.0, 120.0, 102.0) * 20:
        run.num_tensors = num_tensors
        run.steps(1)
    assert run.machine.num_replans == 0
