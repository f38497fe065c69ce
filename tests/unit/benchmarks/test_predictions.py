"""Predictions were committed before their runs, from a profile of another budget, and are unchanged."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.report.predictions import broken
from benchmarks.report.results import read_results
from benchmarks.rows import Row
from benchmarks.suites.suite import load_suite, suite_names
from megatron.swap.common.plan import load_plan
from tests.unit.benchmarks.made_report import RESULTS, ROOT, a_row
from tests.unit.benchmarks.test_runner import a_plan

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
    for changed in ({}, {"outcome": "oom_device", "predicted_peak_gib": None}, {"commit": "c0ffee" * 6}):
        assert made.problems(**changed) == []
    (said,) = made.problems(predicted_peak_gib=79.9)
    assert f"{NAME} has predicted_peak_gib 79.5, the row 79.9" in said
    whole = made.profile.read_text()
    made.profile.write_text(f"{whole} ")
    (said,) = made.problems()
    assert "no profile-*.json beside it has this hash" in said
    made.profile.write_text(whole)
    made.plan.write_text(made.plan.read_text() + "\n")
    (said,) = made.problems()
    assert "is not what the row's commit" in said
    made.plan.unlink()
    (said,) = made.problems()
    assert said.endswith(f"{NAME} is missing")
