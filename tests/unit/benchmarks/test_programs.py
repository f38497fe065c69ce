"""Benchmark programs with rows of their own, as far as they run without a GPU and without other libraries."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import frameworks, plan_points
from benchmarks.machine import ROOT
from megatron.swap.common.plan import load_plan
from megatron.swap.forecast.flags import check_known

# ------------------------------------------------------------------------------------------- any model

TINY = "--layers 3 --tokens 16 --hidden-size 32 --vocab-size 64 --steps 2"


def measured(*methods: str) -> list[dict[str, Any]]:
    """Return the row of each method of the benchmark of any model."""
    any_model = pytest.importorskip("benchmarks.any_model", exc_type=ImportError)
    parse = any_model.parser().parse_args
    return [any_model.measure(parse([*TINY.split(), "--method", *method.split()])) for method in methods]


@pytest.mark.slow
def test_any_model_computes_the_same_losses_with_every_method(tmp_path: Path) -> None:
    save = f"--save {tmp_path}/new"
    rows = measured(*(f"{method} {save}" for method in ("nothing", "checkpointing", "1e-4", "1e-4 --prepared-mask")))
    assert len({tuple(row["losses"]) for row in rows}) == 1
    assert rows[2]["stage"] == "stable"
    assert rows[2]["peak_gib"] <= 1e-4
    assert {one.name for one in (tmp_path / "new").iterdir()} == {"plan-1e-4.json", "profile-1e-4.json"}
    assert load_plan(str(tmp_path / "new" / "plan-1e-4.json")).predicted is not None


# ------------------------------------------------------------------------------------------- weights in host memory


def printed_row(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.nightly
def test_lora_does_not_depend_on_where_weights_are(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    from benchmarks import lora

    tiny = "--shape tiny --tokens 32 --chunk 16 --steps 1 --rank 2"
    with pytest.raises(SystemExit, match="--host-gib is for activations that are swapped"):
        lora.main([*tiny.split(), "--host-gib", "1"])
    rows = []
    for more in ("", "--device-layers 1", "--device-layers 0 --activations 0-3", "--device-layers 2 --activations 1.0"):
        lora.main([*tiny.split(), *more.split()])
        rows.append(printed_row(capsys))
    assert len({tuple(row["losses"]) for row in rows}) == 1
    assert rows[0]["losses"][0] > rows[0]["losses"][1]
    assert [row["device_layers"] for row in rows] == [4, 1, 0, 2]
    assert rows[3]["stage"] == "stable"
    lora.main(f"{tiny} --norms torch --adapters q-v --activations 1.0 --host-gib 0.2".split())
    row = printed_row(capsys)
    assert (row["norms"], row["adapters"], row["host_gib"], row["stage"]) == ("torch", "q-v", 0.2, "stable")
    assert row["losses"][0] == pytest.approx(rows[0]["losses"][0], rel=1e-2)


@pytest.mark.nightly
def test_inference_decodes_the_same_tokens_with_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    from benchmarks import weights_inference

    rows = {}
    for method in ("swap", "accelerate", "device"):
        tiny = "--shape tiny --batch 2 --tokens 8 --decode 3 --steps 1 --device-layers 1"
        weights_inference.main([*tiny.split(), "--method", method])
        rows[method] = printed_row(capsys)
    assert len({tuple(row["decoded"]) for row in rows.values()}) == 1
    assert {method: row["device_layers"] for method, row in rows.items()} == {"swap": 1, "accelerate": 1, "device": 4}


# ------------------------------------------------------------------------------------------- transformers' Trainer


def trained(method: str) -> dict[str, Any]:
    """Run a process of its own: accelerate's settings are a process's, and a run that fails leaves its guard on."""
    tiny = "--layers 4 --hidden-size 64 --vocab-size 256 --tokens 64 --steps 2"
    command = [sys.executable, "-m", "benchmarks.trainer", *tiny.split(), "--method", method]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.nightly
def test_the_trainer_computes_the_same_losses_with_every_method() -> None:
    pytest.importorskip("accelerate")
    from benchmarks.trainer import WARM_UP

    num_steps = WARM_UP + 2
    rows = [trained(method) for method in ("nothing", "checkpointing", "0.0012")]
    assert len(rows[0]["losses"]) == num_steps
    assert len({tuple(row["losses"][:num_steps]) for row in rows}) == 1
    assert rows[2]["stage"] == "stable"
    assert "no plan stays below" in str(trained("0.00001")["infeasible"])


# ------------------------------------------------------------------------------------------- framework examples

LINE = 'f"step {step}: loss {loss}, gradient norm {grad_norm}, {ms:.0f} ms, {reserved:.1f} GiB"'


def printed(losses: list[float], reserved: float = 20.0) -> str:
    lines = ["iteration 1/2 | lm loss: 1.0E+01"]  # of the framework itself
    for step, loss in enumerate(losses, 1):
        names = {"step": step, "loss": loss, "grad_norm": 2.5, "ms": 100.0, "reserved": reserved}
        lines.append(eval(LINE, names))
    return "\n".join([*lines, "2 steps: 3 GiB out, 3 GiB in, 0 late, 1.0 ms waited, 4 GiB of host memory"])


@pytest.mark.parametrize("example", frameworks.EXAMPLES)
def test_it_reads_what_the_examples_print(example: str) -> None:
    assert f"print({LINE}" in (ROOT / "examples" / f"{example}.py").read_text()


PLAIN = printed([3.25, 3.0]), 0


@pytest.mark.parametrize(
    ("other", "outcome", "is_equal"),
    [
        (PLAIN, "ok", True),
        ((printed([3.25, 3.0000002384185791]), 0), "ok", False),
        ((printed([3.25]), 0), "failed", None),
        ((PLAIN[0], 1), "failed", None),
    ],
    ids=["equal", "a digit differs", "ends early", "fails"],
)
def test_runs_are_compared_to_the_last_digit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: tuple[str, int], outcome: str, is_equal: bool | None
) -> None:
    answers = iter([(printed([3.25, 3.0], 27.0), 0), other, PLAIN])
    monkeypatch.setattr(frameworks, "facts", lambda: {"commit": "abc"})
    monkeypatch.setattr(frameworks, "run", lambda words, time_limit_s: next(answers))
    path = tmp_path / "rows.json"
    status = frameworks.main(["swap_mcore_bridge", "--steps", "2", "--output", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert status == (0 if is_equal else 1)
    assert [(row["outcome"], row["is_equal"]) for row in rows] == [("ok", True), (outcome, is_equal), ("ok", True)]
    assert [row["budget_gib"] for row in rows] == [None, 22.0, None]
    assert (rows[0]["reserved_gib"], rows[0]["step_ms"]) == (27.0, 100)
    assert "--deterministic" in rows[0]["command"]
    assert rows[1]["stats"].startswith("2 steps: ")
    assert outcome == "ok" or "3.25" in rows[1]["output_tail"]


# ------------------------------------------------------------------------------------------- predicted points

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
        check_known(list(point.training_flags))


def test_every_point_is_predicted_or_needs_a_profile() -> None:
    missing = {name for name in plan_points.POINTS if name not in PREDICTED}
    assert all(plan_points.POINTS[name].profile for name in missing)
    assert len(plan_points.POINTS) == 36


OUTPUT = "".join(f" elapsed time per iteration (ms): {ms:.1f} |\n" for ms in (900, 500, 400, 200, 210, 190))
"""As Megatron prints it: 500 is the mean of the first two iterations, so the second took 100."""
PREDICTION = {"command": "true", "budget_gib": 10.0, "device_gib": 9.0, "host_gib": 1.0, "step_ms": 210.0}


@pytest.mark.parametrize(("reserved_gib", "is_within"), [(9.5, True), (10.5, False)])
def test_a_row_compares_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, reserved_gib: float, is_within: bool
) -> None:
    summary = {
        "device_reserved_bytes": int(reserved_gib * 2**30), "saved_peak_bytes": None, "device_peak_bytes": 2**30,
        "host_leased_peak_bytes": 2**29, "optimizer_host_bytes": 2**29, "num_alloc_retries": 0, "losses": [],
    }  # fmt: skip

    def pasted(command: str, limit_s: float, _: tuple[int, ...]) -> Any:
        before, path = command.split(" --swap-summary ")
        assert (before, limit_s) == ("true", 5.0)
        Path(path).write_text(json.dumps(summary))
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
        plan_points.predict("x", plan_points.Point("--gpu h200 --memory-gib 5", point.training_flags), tmp_path)
