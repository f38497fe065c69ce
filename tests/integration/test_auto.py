"""Runs that plan themselves, through the real trainer: equal to the bit in every stage, within the budget."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.common.plan import load_plan
from megatron.swap.common.types import GIB, MIB, format_bytes
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.planner.profile import sha256
from tests.integration.harness import SWAP_SMALL, Run, Trainer, assert_same_training, recorded
from tests.integration.rows import FUSED_LLAMA, PLANNING
from tests.integration.test_matrix import PEAK_WITHIN

VARYING = Path(__file__).with_name("varying_script.py")
FREEZING = Path(__file__).with_name("freezing_script.py")
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


def without_times(value: Any) -> Any:
    """Return a profile's sites and sizes, without the times and speeds of a busy machine."""
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if not name.endswith(("_ms", "_gb_s"))}
    return [without_times(part) for part in value] if isinstance(value, list) else value


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


def test_a_budget_above_the_need_moves_nothing(trainer: Trainer) -> None:
    run = budgeted(trainer, "", 1.5)
    assert stages(run) == ["profile", "stable"]
    assert [step["swapped_out_bytes"] + step["recomputed_bytes"] for step in run.summary["steps"][7:]] == [0] * 7
    assert "the budget is above the need" in run.output


def test_times_are_those_of_steps_that_nobody_records(trainer: Trainer) -> None:
    """The case has more micro-batches than the footprint needs."""
    run = budgeted(trainer, "--global-batch-size 8", 0.7, more="--swap-save-profile profile.json")
    assert load_profile(run.directory / "profile.json").source.endswith("GiB, timed in 3 other steps")
    swapped = [step["swapped_out_bytes"] for step in run.summary["steps"]]
    assert 0 < max(swapped[3:7]) < min(swapped[:3])  # inputs of layers alone


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
    [
        (6, False, "--swap-save-plan and --swap-save-profile: not written"),
        (8, True, "--swap-save-plan and --swap-save-profile: written from a plan that was not compared with others"),
        (13, True, None),
    ],
)
def test_training_that_ends_before_a_plan_stands_says_so(
    trainer: Trainer, num_steps: int, written: bool, line: str | None
) -> None:
    budget_gib = 0.6 * trainer.unswapped(PLANNING).summary["saved_peak_bytes"] / GIB
    flags = f"--train-iters {num_steps} --lr-decay-iters 14 {SWAP_SMALL} --swap-memory-gib {budget_gib}"
    run = trainer.live(f"{flags} --swap-save-plan plan.json --swap-save-profile profile.json")
    told = [text for text in run.output.splitlines() if "training ended before a plan was chosen" in text]
    begin = " swap: training ended before a plan was chosen, which takes up to 19 steps"
    assert told == ([] if line is None else [f"{begin}; {line}"])
    assert [(run.directory / name).exists() for name in ("plan.json", "profile.json")] == [written, written]
    if written:
        profile = load_profile(run.directory / "profile.json")
        assert load_plan(run.directory / "plan.json").profile_sha256 == sha256(profile)


def test_a_budget_that_cannot_be_met_says_the_smallest(trainer: Trainer) -> None:
    """The smallest budget, as the message prints it, is feasible."""
    refused = trainer.failing(f"{PLANNING} {SWAP_SMALL} --swap-memory-gib 0.0005 {recorded('torch')}")
    found = re.search(r"no plan stays below 0\.0005 GiB: .* found feasible is ([\d.]+) GiB", refused.error)
    assert found, refused.error
    _, run = trainer.pair(PLANNING, f"--swap-memory-gib {found[1]}")
    assert run.summary["planning"]["predicted_peak_gib"] <= float(found[1])
    assert "above the budget: planned again" not in run.output


def test_all_ranks_end_with_that_message(trainer: Trainer) -> None:
    run = trainer.failing(f"{PLANNING} {SWAP_SMALL} --swap-memory-gib 0.0005 {recorded('torch')}", ranks=2)
    told = re.findall(r"^\[rank\d\]: error: no plan stays below 0\.0005 GiB", run.output, flags=re.MULTILINE)
    assert len(told) == 2, run.tail


def test_the_stage_that_needs_most_says_the_smallest(trainer: Trainer) -> None:
    flags = (f"--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6 --global-batch-size 8 "
             f"{PLANNING} {SWAP_SMALL}")  # fmt: skip
    refused = trainer.failing(f"{flags} --swap-memory-gib 0.00005", ranks=2)
    found = re.search(r"found feasible is ([\d.]+) GiB", refused.error)
    assert found, refused.tail
    trainer.live(f"{flags} --swap-memory-gib {found[1]}", ranks=2)


def test_more_micro_batches_in_a_pipeline(trainer: Trainer) -> None:
    """A step has one micro-batch at first, so that a stage never holds two at once, and four from step 13 on."""
    flags = (
        "^--global-batch-size ^--num-attention-heads ^4 --num-attention-heads 4 --pipeline-model-parallel-size 2 "
        "--step-batch-size-schedule '0:2 1536:8' --train-iters 26 --lr-decay-iters 26"
    )
    budget_gib = 0.6 * trainer.unswapped(flags, ranks=2).summary["saved_peak_bytes"] / GIB
    _, run = trainer.pair(flags, f"--swap-memory-gib {budget_gib}", ranks=2)
    assert "steps have 4 micro-batches, not 1" in run.output
    assert run.summary["saved_peak_bytes"] <= budget_gib * GIB


def test_more_micro_batches_without_a_pipeline_keep_the_plan(trainer: Trainer) -> None:
    """A step has two micro-batches at first and four from step 9 on. One after the other, they hold no more memory."""
    schedule = "--step-batch-size-schedule '0:4 2048:8' --train-iters 14 --lr-decay-iters 14"
    flags = f"^--global-batch-size ^--num-attention-heads ^4 --num-attention-heads 4 {schedule}"
    budget_gib = 0.6 * trainer.unswapped(flags).summary["saved_peak_bytes"] / GIB
    _, run = trainer.pair(flags, f"--swap-memory-gib {budget_gib}")
    assert "using step batch size schedule" in run.output
    assert len({step["swapped_out_bytes"] for step in run.summary["steps"][-2:]}) == 1
    assert run.summary["steps"][-1]["swapped_out_bytes"] > 1.5 * run.summary["steps"][-7]["swapped_out_bytes"]
    assert stages(run) == ["profile", "search", "stable"]
    assert run.summary["planning"]["num_replans"] == 0
    assert run.summary["saved_peak_bytes"] <= budget_gib * GIB


@pytest.mark.parametrize("num_frozen", [0, 3])
def test_frozen_layers_save_nothing_and_the_first_trained_one_never_runs_whole(
    trainer: Trainer, num_frozen: int
) -> None:
    """The first trained layer's input needs no gradient. Recomputed from it, the layer's weights would get no
    gradient."""
    flags = f"--frozen-layers {num_frozen} {PLANNING}"
    plain = trainer.run(f"{flags} --swap-layers none {recorded('torch')}", program=FREEZING)
    budget_gib = 0.6 * plain.summary["saved_peak_bytes"] / GIB
    flags += f" {SWAP_SMALL} --swap-memory-gib {budget_gib} --swap-save-profile profile.json"
    run = trainer.run(f"{flags} {recorded('torch')}", program=FREEZING)
    assert (run.summary["losses"], run.summary["grad_norms"]) == (plain.summary["losses"], plain.summary["grad_norms"])
    assert stages(run) == ["profile", "search", "stable"]
    assert run.summary["saved_peak_bytes"] <= budget_gib * GIB
    profile = load_profile(run.directory / "profile.json")
    sections = {layer: [part.name for part in entry.sections] for entry in profile.layers for layer in entry.layers}
    part = "behind pre_mlp_layernorm/0"
    assert sections == {num_frozen: [part], **{layer: [part, "layer"] for layer in range(num_frozen + 1, 8)}}


@pytest.mark.nightly
def test_a_budget_where_only_the_head_is_trained(trainer: Trainer) -> None:
    """No layer runs backward. So either nothing needs to be swapped, or no plan helps."""
    flags = f"--frozen-layers 8 {PLANNING}"
    plain = trainer.run(f"{flags} --swap-layers none {recorded('torch')}", program=FREEZING)
    peak_gib = plain.summary["saved_peak_bytes"] / GIB
    flags += f" {SWAP_SMALL}"
    run = trainer.run(f"{flags} --swap-memory-gib {1.01 * peak_gib} {recorded('torch')}", program=FREEZING)
    assert (run.summary["losses"], run.summary["grad_norms"]) == (plain.summary["losses"], plain.summary["grad_norms"])
    assert stages(run) == ["profile", "stable"]
    assert run.summary["planning"]["predicted_peak_gib"] == pytest.approx(peak_gib)
    run = trainer.run(f"{flags} --swap-memory-gib {0.9 * peak_gib}", program=FREEZING, check=False)
    assert "the smallest budget that was found feasible is" in run.error


@pytest.mark.nightly
def test_evaluations_between_steps_change_nothing(trainer: Trainer) -> None:
    """One evaluation runs while steps are recorded, one while plans are tried, one later. The plan depends on the
    times."""
    plain = budgeted(trainer, "", 0.6, more="--swap-save-profile profile.json")
    run = budgeted(trainer, "--eval-iters 1 --eval-interval 2", 0.6, more="--swap-save-profile profile.json")
    assert run.output.count("validation loss at iteration") >= 3
    assert run.summary["losses"] == plain.summary["losses"]
    assert run.summary["planning"]["num_replans"] == plain.summary["planning"]["num_replans"] == 0
    assert_peak_as_predicted(run)
    recorded_in_run, recorded_in_plain = (json.loads((r.directory / "profile.json").read_text()) for r in (run, plain))
    assert without_times(recorded_in_run) == without_times(recorded_in_plain)


def test_a_length_that_alternates_is_planned_for_at_its_largest(trainer: Trainer) -> None:
    """The last recorded step is a short one. The long steps do not exceed the plan."""
    flags = f"{PLANNING} --lengths 1:32 1:64"
    plain = trainer.run(f"{flags} --swap-layers none {recorded('torch')}", program=VARYING)
    budget_gib = 0.8 * plain.summary["saved_peak_bytes"] / GIB
    run = trainer.run(f"{flags} {SWAP_SMALL} --swap-memory-gib {budget_gib} {recorded('torch')}", program=VARYING)
    assert_same_training(plain, run)
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
