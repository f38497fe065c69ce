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
from benchmarks.suites.suite import load_suite, suite_names
from megatron.swap.common.plan import load_plan
from megatron.swap.planner.profile import save_profile, sha256
from tests.unit.benchmarks.made_report import RESULTS, ROOT, a_row
from tests.unit.benchmarks.test_runner import a_plan
from tests.unit.planner.cases import random_profile

NAME = "docs/results/predictions/one.json"


def test_the_committed_predictions_are_kept() -> None:
    rows = [row for _, rows in read_results(RESULTS).files for row in rows]
    assert broken(RESULTS, rows) == []


def test_a_prediction_of_a_point_is_that_of_its_plan() -> None:
    folder = RESULTS / "plan-points"
    for name, row in json.loads((folder / "predictions.json").read_text())["points"].items():
        plan = load_plan(folder / f"{name}.json")
        assert plan.predicted is not None
        found = plan.budget_gib, plan.predicted.peak_gib, plan.predicted.step_ms, plan.offload_fraction
        assert found == tuple(row[key] for key in ("budget_gib", "device_gib", "step_ms", "offload_fraction")), name
        assert f"--swap-plan docs/results/plan-points/{name}.json" in row["command"]


def test_committed_plans_are_plans_of_a_suite() -> None:
    named = {
        method.plan_file
        for name in suite_names() for case in load_suite(name).cases for method in case.methods
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


def test_kept_predictions(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for changed in (
        {}, {"outcome": "oom_device", "predicted_peak_gib": None},
        {"commit": "c0ffee" * 6}, {"commit": ""},  # git does not know it
        {"flags": made.row["flags"].replace("predictions", "plans")}, {"flags": "--num-layers 4 --swap-layers all"},
    ):  # fmt: skip
        assert made.problems(**changed) == []
    for field, value in (("budget_gib", 81.0), ("predicted_peak_gib", 79.9), ("predicted_step_ms", 1410.0),
                         ("profile_sha256", "other")):  # fmt: skip
        (said,) = made.problems(**{field: value})
        assert f"{NAME} has {field} " in said
        assert f"the row {value!r}" in said
    whole = made.profile.read_text()
    made.profile.write_text(f"{whole} ")
    (said,) = made.problems()
    assert "no profile-*.json beside it has this hash" in said
    made.profile.write_text(whole)
    of = replace(random_profile(1), source="measured in training, budget 94.1 GiB", hook_ms=0.5)
    save_profile(of, made.profile)  # it has learned what hooks cost, after its plan
    made.plan.write_text(made.plan.read_text().replace(made.row["profile_sha256"], sha256(of)))
    git(tmp_path, "commit", "-qam", "Another profile")
    assert made.problems(profile_sha256=sha256(of), commit=git(tmp_path, "rev-parse", "HEAD")) == []
    made.plan.write_text(made.plan.read_text() + "\n")
    (said,) = made.problems(profile_sha256=sha256(of))
    assert "is not what the row's commit" in said
    made.plan.unlink()
    (said,) = made.problems()
    assert said.endswith(f"{NAME} is missing")


def test_a_prediction_that_was_committed_after_its_run(tmp_path: Path) -> None:
    made = Made(tmp_path)
    git(tmp_path, "checkout", "-q", "--orphan", "before")
    git(tmp_path, "rm", "-rq", "--cached", ".")
    git(tmp_path, "commit", "-qm", "Nothing yet", "--allow-empty")
    (said,) = made.problems(commit=git(tmp_path, "rev-parse", "HEAD"))
    assert "it was not committed before" in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("measured, budget 80 GiB", "is for a budget of 80.0 GiB, under which its profile profile-one.json was taken"),
        ("measured in training", "does not say 'budget N GiB' or 'no budget': 'measured in training'"),
        *((source, None) for source in ("no budget, everything kept", "budget 80.2 GiB of 139.8", "budget 79 GiB")),
    ],
)
def test_the_profile_is_of_another_budget(tmp_path: Path, source: str, said: str | None) -> None:
    problems = Made(tmp_path, source).problems()
    assert len(problems) == (said is not None)
    assert said is None or said in problems[0]
