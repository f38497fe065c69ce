"""Runs that plan themselves, through the real trainer: equal to the bit in every stage, within the budget."""

import json
import re
from pathlib import Path

import pytest

from megatron.swap.common.plan import load_plan
from megatron.swap.common.types import GIB, MIB, format_bytes
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.planner.profile import sha256
from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_training, recorded
from tests.integration.rows import FUSED_LLAMA, PLANNING
from tests.integration.test_matrix import PEAK_WITHIN

VARYING = Path(__file__).with_name("varying_script.py")


def budgeted(trainer: Trainer, flags: str, share: float, *, more: str = "") -> Run:
    """Return a run within ``share`` of the unswapped run's memory, compared with that run to the bit."""
    plain = trainer.unswapped(f"{flags} {PLANNING}")
    budget_gib = share * plain.summary["saved_peak_bytes"] / GIB
    _, run = trainer.pair(f"{flags} {PLANNING}", f"--swap-memory-gib {budget_gib} {more}")
    planning = run.summary["planning"]
    assert planning["budget_gib"] == pytest.approx(budget_gib)
    assert planning["predicted_peak_gib"] <= budget_gib
    return run


def stages(run: Run) -> list[str]:
    return [entry["stage"] for entry in run.summary["planning"]["stages"]]


def assert_peak_as_predicted(run: Run) -> None:
    """Check the peak of the whole run. Its first steps hold less than its plan."""
    predicted_gib, peak_gib = run.summary["planning"]["predicted_peak_gib"], run.summary["saved_peak_bytes"] / GIB
    assert (1 - PEAK_WITHIN) * predicted_gib <= peak_gib <= predicted_gib * 1.0001


@pytest.mark.nightly
def test_what_has_no_room_in_host_memory_stays(trainer: Trainer) -> None:
    """The steps that are measured would swap more than fits into host memory. The plan follows the memory that there
    is."""
    more = f"--swap-host-gib {5 * MIB / GIB}"
    run = budgeted(trainer, "--micro-batch-size 8 --global-batch-size 8", 0.5, more=more)
    assert run.output.count("no room outside the device for some saved tensors: they are kept") == 1
    assert stages(run) == ["profile", "search", "stable"]
    assert 4 * MIB < run.summary["host_leased_peak_bytes"] <= 5 * MIB
    assert run.summary["stayed_bytes"] > MIB
    assert_peak_as_predicted(run)


@pytest.mark.nightly
def test_the_plan_that_was_found_can_be_carried_out_at_once(trainer: Trainer) -> None:
    found = budgeted(trainer, FUSED_LLAMA, 0.6, more="--swap-save-plan plan.json --swap-save-profile profile.json")
    plan = json.loads((found.directory / "plan.json").read_text())
    assert plan["predicted"]["peak_gib"] == found.summary["planning"]["predicted_peak_gib"]
    assert (found.directory / "profile.json").exists()
    again = trainer.live(f"{FUSED_LLAMA} {PLANNING} {SWAP_SMALL} --swap-plan {found.directory / 'plan.json'}")
    assert_same_training(found, again)
    moved = ("swapped_out_bytes", "swapped_in_bytes", "recomputed_bytes", "num_recomputed")
    assert [again.summary[name] for name in moved] == [found.summary[name] for name in moved]


@pytest.mark.parametrize(
    ("num_steps", "written", "line"),
    [pytest.param(6, False, "not written", marks=pytest.mark.nightly),
     (8, True, "written from a plan that was not compared with others")],
)
def test_training_that_ends_before_a_plan_stands_says_so(
    trainer: Trainer, num_steps: int, written: bool, line: str
) -> None:
    budget_gib = 0.6 * trainer.unswapped(PLANNING).summary["saved_peak_bytes"] / GIB
    flags = f"--train-iters {num_steps} --lr-decay-iters 14 {SWAP_SMALL} --swap-memory-gib {budget_gib}"
    run = trainer.live(f"{flags} --swap-save-plan plan.json --swap-save-profile profile.json")
    told = [text for text in run.output.splitlines() if "training ended before a plan was chosen" in text]
    begin = " swap: training ended before a plan was chosen, which takes up to 19 steps; "
    assert told == [f"{begin}--swap-save-plan and --swap-save-profile: {line}"]
    assert [(run.directory / name).exists() for name in ("plan.json", "profile.json")] == [written, written]
    if written:
        profile = load_profile(run.directory / "profile.json")
        assert load_plan(run.directory / "plan.json").profile_sha256 == sha256(profile)


@pytest.mark.nightly
def test_a_budget_that_cannot_be_met_says_the_smallest(trainer: Trainer) -> None:
    """All ranks end. The smallest budget, as the message prints it, is that of the stage which needs most."""
    flags = (f"--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6 --global-batch-size 8 "
             f"{PLANNING} {SWAP_SMALL}")  # fmt: skip
    refused = trainer.failing(f"{flags} --swap-memory-gib 0.00005", ranks=2)
    told = r"^\[rank\d\]: error: no plan stays below 5e-05 GiB: .* found feasible is ([\d.]+) GiB"
    found = re.findall(told, refused.output, flags=re.MULTILINE)
    assert len(found) == 2, refused.tail
    run = trainer.live(f"{flags} --swap-memory-gib {found[0]}", ranks=2)
    assert run.summary["planning"]["predicted_peak_gib"] <= float(found[0])


@pytest.mark.nightly
def test_evaluations_between_steps_change_nothing(trainer: Trainer) -> None:
    """One evaluation runs while steps are recorded, one while plans are tried, one later."""
    run = budgeted(trainer, "--eval-iters 1 --eval-interval 2", 0.6)
    assert run.output.count("validation loss at iteration") >= 3
    assert run.summary["losses"] == trainer.unswapped(PLANNING).summary["losses"]
    assert run.summary["planning"]["num_replans"] == 0
    assert_peak_as_predicted(run)


def test_another_sequence_length_is_planned_anew_and_known_the_next_time(trainer: Trainer, tmp_path: Path) -> None:
    flags = "--train-iters 40 --lr-decay-iters 40 --lengths 12:32 10:64"
    plain = trainer.run(f"{flags} --swap-layers none {recorded('torch')}", program=VARYING)
    budget_gib = 0.6 * plain.summary["saved_peak_bytes"] / GIB
    run = trainer.run(
        f"{flags} {SWAP_SMALL} --swap-memory-gib {budget_gib} {recorded('torch')}", program=VARYING
    )
    assert_same_training(plain, run)
    planning = run.summary["planning"]
    # Longer at step 13 (measured), shorter at 23 (known, after three steps), longer at 35 (known, at once).
    assert planning["num_replans"] == 3
    assert stages(run).count("profile") == 2
    assert "the plan is known" in run.output
    assert run.summary["saved_peak_bytes"] <= budget_gib * GIB


@pytest.mark.nightly
def test_a_length_that_no_plan_fits_is_trained_above_the_budget_and_the_next_one_below(trainer: Trainer) -> None:
    flags = "--train-iters 46 --lr-decay-iters 46 --lengths 15:32 16:64 15:32"
    plain = trainer.run(f"{flags} --swap-layers none {recorded('torch')}", program=VARYING)
    budget_gib = 0.6 * MIB / GIB  # 64 need 0.69
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-memory-gib {budget_gib} {recorded('torch')}", program=VARYING)
    assert_same_training(plain, run)
    planning = run.summary["planning"]
    assert planning["num_infeasible"] == 1
    found = re.search(r"no plan keeps such steps below the budget \(([\d.]+) GiB would do\)", run.output)
    assert found, run.tail
    assert float(found[1]) > budget_gib
    assert stages(run) == ["profile", "search", "stable"] * 2 + ["stable"]
    predicted = format_bytes(float(found[1]) * GIB)
    assert re.search(rf"predicted [\d.]+ ms and {re.escape(predicted)}\)", planning["stages"][5]["note"])
    assert planning["predicted_peak_gib"] <= budget_gib
