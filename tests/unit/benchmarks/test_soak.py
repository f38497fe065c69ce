"""The soak: its verdict finds growth, and three hundred steps are flat."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import command, lengths
from benchmarks.soak.meters import MIB, Metrics, changes
from benchmarks.soak.process import as_row

CYCLE = 4


def samples(num_steps: int, **grown: float) -> list[Metrics]:
    """Return samples of a flat process, whose phases differ. ``grown``: bytes or numbers that each step adds."""
    made = []
    for step in range(1, num_steps + 1):
        metrics: Metrics = {
            "step": step, "device_bytes": 10 * MIB + step % CYCLE * MIB, "pinned_bytes": 50 * MIB,
            "resident_bytes": 900 * MIB + (step * 7919 % 13 - 6) * MIB // 8, "num_files": 20, "num_threads": 9,
        }  # fmt: skip
        if step % CYCLE == 0:
            metrics["num_objects"] = 300_000
        for name, more in grown.items():
            if name in metrics:
                metrics[name] += int(more * step)
        made.append(metrics)
    return made


def grown(found: list[Metrics]) -> set[str]:
    return {change["metric"] for change in changes(found, CYCLE) if not change["is_flat"]}


@pytest.mark.parametrize(
    ("metric", "more"),
    [("device_bytes", 1024), ("pinned_bytes", 4096), ("resident_bytes", 100_000), ("num_files", 0.02),
     ("num_threads", 0.02), ("num_objects", 6)],
)  # fmt: skip
def test_a_little_of_each_step_is_found(metric: str, more: float) -> None:
    assert grown(samples(300, **{metric: more})) == {metric}


def test_what_grows() -> None:
    assert grown(samples(301)) == set()
    found = samples(300)
    for sample in found:
        if sample["step"] % CYCLE == 2:  # each evaluation leaves something that the next step frees, say
            sample["device_bytes"] += 1000 * sample["step"]
    changed = [change for change in changes(found, CYCLE) if not change["is_flat"]]
    assert {(change["metric"], change["phase"]) for change in changed} >= {("device_bytes", 2)}
    with pytest.raises(ValueError, match="7 steps have no three cycles of 4"):
        changes(samples(7), CYCLE)


def run(case: str, num_steps: int) -> dict[str, Any]:
    row = command.run_case(case, num_steps)
    assert row["losses_equal"]
    assert row["offloaded_bytes"] > 0
    assert [change for change in row["changes"] if not change["is_flat"]] == []
    assert command.is_good(row)
    return row


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_three_hundred_steps_of_the_trainer() -> None:
    """Plans and lengths change, evaluations and checkpoints come between, optimizer state lies on disk."""
    assert run("planned", 300)["num_plan_changes"] >= 6


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_runs_whose_lengths_change_side_by_side(tmp_path: Path) -> None:
    """Losses are equal and all is flat; the guard rescues, more often than there are long steps."""
    output = tmp_path / "rows.json"
    words = ["--suite", "quick-planner", "--case", "L6-h64-lengths", "--steps", "128", "--budget-gib", "0.004"]
    assert lengths.main([*words, "--device-gib", "0.0055", "--output", str(output)]) == 0
    planned, guarded = json.loads(output.read_text())["rows"]
    assert planned["num_compared"] == guarded["num_compared"] == 128
    assert planned["num_plan_changes"] >= 3
    assert guarded["num_rescues"] >= 128


def test_runs_that_end_at_different_steps_are_compared_as_far_as_both_went() -> None:
    found = samples(24)
    swapped = {"losses": ["a", "b", "c"], "offloaded_bytes": 1}
    for plain, is_equal in ((["a", "b"], True), (["a", "b", "c", "d"], True), (["a", "x"], False), ([], False)):
        row = as_row("planned", "", CYCLE, dict(swapped), {"losses": plain}, found)
        assert (row["losses_equal"], row["num_compared"]) == (is_equal, min(3, len(plain)))


@pytest.mark.nightly
def test_a_loop_whose_steps_are_interrupted() -> None:
    run("interrupted steps", 150)
