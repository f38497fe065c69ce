"""Points that plan predicts and a GPU measures: committed files belong together; a row says what was measured."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_points
from benchmarks.machine import ROOT
from megatron.swap.common.plan import load_plan
from megatron.swap.forecast.flags import check_known

PREDICTED = json.loads((ROOT / plan_points.PREDICTIONS).read_text())["points"]


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", ""))


@pytest.mark.parametrize("name", PREDICTED)
def test_a_prediction_is_that_of_its_plan_and_its_point(name: str) -> None:
    row, point = PREDICTED[name], plan_points.POINTS[name]
    path = plan_points.FOLDER / f"{name}.json"
    plan = load_plan(ROOT / path)
    assert plan.predicted is not None
    assert (plan.budget_gib, plan.predicted.peak_gib, plan.predicted.step_ms, plan.offload_fraction) == (
        row["budget_gib"], row["device_gib"], row["step_ms"], row["offload_fraction"],
    )  # fmt: skip
    assert row["device_gib"] < row["budget_gib"]
    pasted = words(row["command"])
    assert pasted[pasted.index("--swap-plan") + 1] == str(path)
    assert f"--train-iters {point.iterations}" in row["command"]
    assert row.get("num_warm_up", plan_points.NUM_WARM_UP) == point.num_warm_up
    assert words(row["plan"])[2:4] == ["--save", str(path)]
    if point.profile is None:
        check_known(point.training_flags)


def test_every_point_is_predicted_or_needs_a_profile() -> None:
    missing = {name for name in plan_points.POINTS if name not in PREDICTED}
    assert all(plan_points.POINTS[name].profile for name in missing)
    assert len(plan_points.POINTS) == 36


OUTPUT = "".join(f" elapsed time per iteration (ms): {ms:.1f} |\n" for ms in (900, 500, 400, 200, 210, 190))
"""As Megatron prints it: 500 is the mean of the first two iterations, so the second took 100."""
PREDICTION = {"command": "true", "budget_gib": 10.0, "device_gib": 9.0, "host_gib": 1.0, "step_ms": 210.0}


def summary(reserved_gib: float) -> dict[str, Any]:
    return {
        "device_reserved_bytes": int(reserved_gib * 2**30), "saved_peak_bytes": None, "device_peak_bytes": 2**30,
        "host_leased_peak_bytes": 2**29, "optimizer_host_bytes": 2**29, "num_alloc_retries": 0, "losses": [],
    }  # fmt: skip


@pytest.mark.parametrize(("reserved_gib", "is_within"), [(9.5, True), (10.5, False)])
def test_a_row_compares_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, reserved_gib: float, is_within: bool
) -> None:
    def pasted(command: str, limit_s: float, _: tuple[int, ...]) -> Any:
        before, path = command.split(" --swap-summary ")
        assert (before, limit_s) == ("true", 5.0)
        Path(path).write_text(json.dumps(summary(reserved_gib)))
        return plan_points.subprocess.CompletedProcess([], 0, OUTPUT)

    monkeypatch.setattr(plan_points, "paste", pasted)
    row = plan_points.run(PREDICTION, 5.0)
    assert row["outcome"] == "ok"
    assert row["step_ms_all"] == [900.0, 100.0, 400.0, 200.0, 210.0, 190.0]
    assert row["step_ms_median"] == 200.0
    assert plan_points.run(PREDICTION | {"num_warm_up": 4}, 5.0)["step_ms_median"] == 200.0
    assert plan_points.run(PREDICTION | {"num_warm_up": 5}, 5.0)["step_ms_median"] == 190.0
    assert row["step_error"] == pytest.approx(0.05)
    assert row["device_error"] == pytest.approx(9.0 / reserved_gib - 1)
    assert row["is_within_budget"] is is_within
    assert row["host_gib"] == 1.0
    assert ("within" if is_within else "ABOVE") in plan_points.line("x", row)


def test_a_run_that_fails_or_takes_too_long_is_a_row() -> None:
    failed = plan_points.run(PREDICTION | {"command": "echo broken; false"}, 20.0)
    assert failed["outcome"] == "failed"
    assert "broken" in failed["output_tail"]
    assert plan_points.run(PREDICTION | {"command": "sleep 30; true"}, 0.2)["outcome"] == "timeout"


def test_a_point_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    point = plan_points.POINTS["dense-tight"]
    with pytest.raises(plan_points.PointError, match=r"^x: Does not fit in 5 of the 139.8 GiB"):
        plan_points.predict("x", plan_points.Point("--gpu h200 --memory-gib 5", point.flags), tmp_path)
