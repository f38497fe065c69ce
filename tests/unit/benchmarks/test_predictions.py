"""Predictions were committed before their runs, from a profile of another budget, and are unchanged."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.predictions import broken
from benchmarks.report.results import read_results
from benchmarks.rows import Row
from benchmarks.suites.suite import find_suite, load_suite, suite_names
from megatron.swap.common.plan import load_plan
from megatron.swap.planner.profile import save_profile, sha256
from tests.unit.benchmarks.made_report import RESULTS, ROOT, a_row
from tests.unit.benchmarks.test_runner import a_plan
from tests.unit.planner.cases import random_profile

NAME = "docs/results/predictions/one.json"


def test_the_committed_predictions_are_kept() -> None:
    rows = [row for _, rows in read_results(RESULTS).files for row in rows]
    assert broken(RESULTS, rows) == []


def test_committed_plans_are_plans_of_a_suite() -> None:
    named = {
        method.plan_file
        for name in suite_names() for case in load_suite(find_suite(name)).cases for method in case.methods
    }  # fmt: skip
    files = [path for path in (RESULTS / "predictions").glob("*.json") if not path.name.startswith("profile-")]
    for path in files:
        plan = load_plan(path)
        assert plan.predicted is not None, path.name
        assert plan.budget_gib is not None, path.name
        assert path.relative_to(ROOT).as_posix() in named, f"{path.name}: no method of a suite runs it"


def git(root: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


class Made:
    """A repository with a profile, a prediction, and the row of its run."""

    def __init__(self, root: Path, source: str = "measured in training, budget 94.1 GiB", budget_gib: float = 80.0):
        self.root, self.results = root, root / "docs" / "results"
        self.folder = self.results / "predictions"
        self.folder.mkdir(parents=True)
        self.profile = self.folder / "profile-one.json"
        self.profile.write_text(json.dumps({"source": source}))
        digest = hashlib.sha256(self.profile.read_bytes()).hexdigest()
        self.plan = a_plan(self.folder / "one.json", budget_gib=budget_gib, profile_sha256=digest)
        git(root, "init", "-q")
        git(root, "add", ".")
        git(root, "commit", "-qm", "A prediction")
        self.row: Row = a_row(
            "planned", 1410.0, 79.9, f"--swap-plan {NAME}", budget_gib=budget_gib, predicted_peak_gib=79.5,
            predicted_step_ms=1400.0, profile_sha256=digest, num_replans=0, commit=git(root, "rev-parse", "HEAD"),
        )  # fmt: skip

    def problems(self, **changed: Any) -> list[str]:
        return broken(self.results, [{**self.row, **changed}], self.root)


def test_a_kept_prediction(tmp_path: Path) -> None:
    assert Made(tmp_path).problems() == []


def test_a_profile_that_learned_what_hooks_cost_after_its_plan(tmp_path: Path) -> None:
    made = Made(tmp_path)
    of = replace(random_profile(1), source="measured in training, budget 94.1 GiB", hook_ms=0.5)
    save_profile(of, made.profile)
    path = made.folder / "one.json"
    path.write_text(path.read_text().replace(made.row["profile_sha256"], sha256(of)))
    git(tmp_path, "commit", "-qam", "Another profile")
    assert made.problems(profile_sha256=sha256(of), commit=git(tmp_path, "rev-parse", "HEAD")) == []


@pytest.mark.parametrize("source", ["no budget, everything kept", "budget 80.2 GiB of 139.8", "at a budget 79 GiB"])
def test_profiles_of_other_budgets(tmp_path: Path, source: str) -> None:
    assert Made(tmp_path, source).problems() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("budget_gib", 81.0), ("predicted_peak_gib", 79.9), ("predicted_step_ms", 1410.0), ("profile_sha256", "other")],
)
def test_a_row_carries_what_was_promised(tmp_path: Path, field: str, value: Any) -> None:
    (said,) = Made(tmp_path).problems(**{field: value})
    assert f"{NAME} has {field} " in said
    assert f"the row {value!r}" in said


def test_a_failed_run_has_promised_nothing_to_its_row(tmp_path: Path) -> None:
    assert Made(tmp_path).problems(outcome="oom_device", predicted_peak_gib=None) == []


def test_a_prediction_that_was_updated(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.plan.write_text(made.plan.read_text() + "\n")
    (said,) = made.problems()
    assert "is not what the row's commit" in said


def test_a_prediction_that_was_committed_after_its_run(tmp_path: Path) -> None:
    made = Made(tmp_path)
    git(tmp_path, "checkout", "-q", "--orphan", "before")
    git(tmp_path, "rm", "-rq", "--cached", ".")
    git(tmp_path, "commit", "-qm", "Nothing yet", "--allow-empty")
    (said,) = made.problems(commit=git(tmp_path, "rev-parse", "HEAD"))
    assert "it was not committed before" in said


def test_a_commit_that_git_does_not_know_tells_nothing(tmp_path: Path) -> None:
    assert Made(tmp_path).problems(commit="c0ffee" * 6) == []
    assert Made(tmp_path / "two").problems(commit="") == []


def test_a_profile_that_was_touched_or_is_gone(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.profile.write_text(made.profile.read_text() + " ")
    (said,) = made.problems()
    assert "no profile-*.json beside it has this hash" in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("measured, budget 80 GiB", "is for a budget of 80.0 GiB, under which its profile profile-one.json was taken"),
        ("measured in training", "does not say 'budget N GiB' or 'no budget': 'measured in training'"),
    ],
)
def test_the_profile_is_of_another_budget(tmp_path: Path, source: str, said: str) -> None:
    (problem,) = Made(tmp_path, source).problems()
    assert said in problem


def test_a_prediction_that_is_gone(tmp_path: Path) -> None:
    made = Made(tmp_path)
    made.plan.unlink()
    (said,) = made.problems()
    assert said.endswith(f"{NAME} is missing")


def test_other_plans_are_no_predictions(tmp_path: Path) -> None:
    made = Made(tmp_path)
    assert made.problems(flags=made.row["flags"].replace("predictions", "plans")) == []
    assert made.problems(flags="--num-layers 4 --swap-layers all") == []
