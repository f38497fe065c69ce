"""Predict runs with `megatron-swap plan`, then paste the commands that it prints and measure them.

    python -m benchmarks.plan_points profile mla                     # on the GPU: profiles that predictions need
    python -m benchmarks.plan_points predict                         # anywhere: plans and predictions, to be committed
    python -m benchmarks.plan_points run dense-tight 8b-64k --output points.json       # on the GPU, after the commit
    python -m benchmarks.plan_points unswapped dense-1.3b --output points.json         # on the GPU, to compare with

`predict` writes a plan file for each point and `predictions.json` into docs/results/plan-points. `run` pastes a point's
command with --swap-summary behind it, and writes peaks and step times beside what was predicted. Points that are in
the output already are not run again, so an interrupted run resumes. Without names every point is meant.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, facts, now
from megatron.swap.cli import plan as planner
from megatron.swap.cli.training_command import training_command
from megatron.swap.common.leftovers import own_folder
from megatron.swap.common.plan import load_plan
from megatron.swap.common.records import write_text
from megatron.swap.common.types import GIB

FOLDER = Path("docs/results/plan-points")
PREDICTIONS = FOLDER / "predictions.json"
NUM_WARM_UP = 3
"""Steps that are not timed: the first ones reserve memory, and copies of optimizer state overlap with layers after.
Where experts get other numbers of tokens in each step, kernels for new sizes are loaded for 10 to 20 steps."""
TIMED_OUT = 124
TIME = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")


@dataclass(frozen=True)
class Point:
    """A run to predict and to measure.

    Attributes:
        options: options of plan.
        training_flags: those of the command that the user has.
        profile: file that the plan is made from, in place of a GPU's figures; relative to the repository.
        iterations: training steps.
        num_warm_up: the first of them, which are not timed.
        on_cpu: whether it is a point for machines without a GPU, which shows that this program works.
    """

    options: str
    training_flags: tuple[str, ...]
    profile: str | None = None
    iterations: int = 8
    num_warm_up: int = NUM_WARM_UP
    on_cpu: bool = False


def read_points() -> dict[str, Point]:
    """Return the points of plan_points.toml."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

    def filled(text: str) -> str:
        return text if "{" not in text else filled(text.format(**content["parts"]))

    found = {}
    for name, given in content["points"].items():
        length, micro, batch = given["sequences"]
        common, iterations = given.get("common", "on_gpu"), given.get("iterations", 8)
        flags = f"{{{common}}} {given['flags']} --seq-length {length} --max-position-embeddings {length}"
        flags += f" --micro-batch-size {micro} --global-batch-size {batch} --train-iters {iterations}"
        kept = {key: given[key] for key in ("profile", "iterations", "num_warm_up") if key in given}
        on_cpu = common == "on_cpu"
        found[name] = Point(filled(given["options"]), tuple(filled(flags).split()), on_cpu=on_cpu, **kept)
    return found


EVERY_POINT = read_points()
POINTS = {name: point for name, point in EVERY_POINT.items() if not point.on_cpu}


class PointError(Exception):
    """A point cannot be predicted or run; the message is one line."""


def profile(name: str, point: Point, budget_gib: float) -> None:
    """Train under a budget until a plan is chosen, and write the profile."""
    if point.profile is None:
        raise PointError(f"{name}: is predicted without a profile; name a point that needs one")
    saved = ["--swap-memory-gib", f"{budget_gib:g}", "--swap-save-profile", point.profile]
    done = paste(training_command([], [*point.training_flags[:-1], "24", *saved], 1, 1), 600.0)
    if done.returncode or not Path(point.profile).exists():
        raise PointError(f"no profile was written:\n{done.stdout[-3000:]}")


def predict(name: str, point: Point, folder: Path) -> dict[str, Any] | None:
    """Plan a point and return its prediction; ``None``: its profile is not measured yet.

    Raises:
        PointError: it does not fit.
    """
    if point.profile is not None and not Path(point.profile).exists():
        return None
    path = folder / f"{name}.json"
    words = ["--save", str(path), *point.options.split()]
    words += ["--", *point.training_flags] if point.profile is None else ["--profile", point.profile]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status = planner.main(words)
    verdict, *parts = out.getvalue().strip().split("\n\n")
    if status:
        raise PointError(f"{name}: {verdict}")
    if point.profile is not None:  # plan prints no command then
        parts = [training_command(list(point.training_flags), ["--swap-plan", str(path)], 1, 1), *parts]
    plan = load_plan(path)
    assert plan.predicted is not None
    return {
        "plan": shlex.join(["megatron-swap", "plan", *words]), "verdict": verdict, "command": parts[0],
        "budget_gib": plan.budget_gib, "device_gib": plan.predicted.peak_gib, "host_gib": _host_gib(parts[1]),
        "step_ms": plan.predicted.step_ms, "num_warm_up": point.num_warm_up, "offload_fraction": plan.offload_fraction,
        "options": parts[2],
    }  # fmt: skip


def _host_gib(speed: str) -> float:
    """Return the GiB of the row `host`."""
    found = re.search(r"^host\s+([\d.]+) (KiB|MiB|GiB)", speed, re.MULTILINE)
    assert found is not None, speed
    return float(found[1]) / {"KiB": 1 << 20, "MiB": 1 << 10, "GiB": 1}[found[2]]


def paste(command: str, limit_s: float, inherited: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell, as a user who pasted it, with this Python's programs first.

    ``inherited``: descriptors that it gets: locks of folders that nobody may remove while it runs.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = ["timeout", "-k", "10", f"{limit_s:g}", "bash", "-c", command]
    return subprocess.run(
        script, cwd=ROOT, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        pass_fds=inherited,
    )  # fmt: skip


def run(predicted: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Paste the command of a prediction and return what was measured beside what was predicted."""
    began = time.monotonic()
    with own_folder("swap-plan-point-") as (folder, owner):
        summary = folder / "run.json"
        done = paste(f"{predicted['command']} --swap-summary {summary}", limit_s, (owner,))
        found = json.loads(summary.read_text()) if done.returncode == 0 and summary.exists() else None
    step_ms = step_times(done.stdout)
    row = {"command": predicted["command"], "wall_s": round(time.monotonic() - began, 1)}
    row |= {f"predicted_{key}": predicted[key] for key in ("device_gib", "host_gib", "step_ms") if key in predicted}
    row |= {key: predicted[key] for key in ("budget_gib",) if key in predicted}
    if found is None:
        outcome = "timeout" if done.returncode == TIMED_OUT else "failed"
        return row | {"outcome": outcome, "step_ms_all": step_ms, "output_tail": done.stdout[-3000:]}
    reserved = found["device_reserved_bytes"] or found["saved_peak_bytes"]  # an emulated device reserves nothing
    timed = step_ms[predicted.get("num_warm_up", NUM_WARM_UP):] or step_ms
    median_ms = statistics.median(timed) if timed else None
    return row | {
        "outcome": "ok",
        "reserved_gib": reserved / GIB,
        "allocated_gib": (found["device_peak_bytes"] or 0) / GIB,
        "host_gib": (found["host_leased_peak_bytes"] + found["optimizer_host_bytes"]) / GIB,
        "num_alloc_retries": found["num_alloc_retries"],
        "losses": found["losses"],
        "step_ms_all": step_ms,
        "step_ms_median": median_ms,
        "is_within_budget": reserved / GIB <= predicted.get("budget_gib", math.inf),
        "device_error": predicted["device_gib"] * GIB / reserved - 1 if "device_gib" in predicted else None,
        "step_error": predicted["step_ms"] / median_ms - 1 if median_ms and "step_ms" in predicted else None,
    }


def step_times(output: str) -> list[float]:
    """Return the milliseconds of each step by Megatron's log, whose second line is the mean of the first two steps."""
    printed = [float(text) for text in TIME.findall(output)]
    if len(printed) > 1:
        printed[1] = round(2 * printed[1] - printed[0], 1)
    return printed


def line(name: str, row: dict[str, Any]) -> str:
    """Return a row of a run in one line."""
    if row["outcome"] != "ok":
        return f"{name}: {row['outcome']} after {row['wall_s']} s"
    step = "no step" if row["step_ms_median"] is None else f"{row['step_ms_median']:,.0f} ms"
    if "budget_gib" not in row:
        return f"{name}: {row['reserved_gib']:.2f} GiB; {step}; {row['wall_s']} s"
    within = "within" if row["is_within_budget"] else "ABOVE"
    step += "" if row["step_error"] is None else f" ({row['step_error']:+.1%})"
    return (f"{name}: {row['reserved_gib']:.2f} GiB, {within} {row['budget_gib']:g} (predicted "
            f"{row['predicted_device_gib']:.2f}, {row['device_error']:+.1%}); {step}; {row['wall_s']} s")  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("profile", "predict", "run", "unswapped"))
    parser.add_argument("names", nargs="*", help="points; default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="plans and predictions")
    parser.add_argument("--output", type=Path, help="run: JSON file of the rows")
    parser.add_argument("--limit-s", type=float, default=200.0, help="run: longest run of one point")
    parser.add_argument("--time-limit-s", type=float, default=540.0, help="run: begin no point after this")
    parser.add_argument("--memory-gib", type=float, default=100.0, help="profile: budget of the profiled run")
    parser.add_argument("--cpu", action="store_true", help="use the point for machines without a GPU")
    options = parser.parse_args(arguments)
    points = {name: point for name, point in EVERY_POINT.items() if point.on_cpu == options.cpu}
    if unknown := set(options.names) - points.keys():
        parser.error(f"{', '.join(sorted(unknown))}: no such point; there are {', '.join(points)}")
    if options.what in ("run", "unswapped") and options.output is None:
        parser.error(f"{options.what}: --output FILE is missing")
    options.points = {name: points[name] for name in options.names or points}
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, predict or run points. Return 0 if all that were asked for are done and within their budgets."""
    options = parse(arguments)
    os.chdir(ROOT)  # plan files are named relative to the repository, as the printed commands have them
    kinds: dict[str, Callable[[argparse.Namespace], int]] = {
        "profile": profile_all, "predict": predict_all, "run": run_all, "unswapped": run_unswapped,
    }  # fmt: skip
    try:
        return kinds[options.what](options)
    except PointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def profile_all(options: argparse.Namespace) -> int:
    for name, point in options.points.items():
        profile(name, point, options.memory_gib)
    return 0


def predict_all(options: argparse.Namespace) -> int:
    made = {name: predict(name, point, options.folder) for name, point in options.points.items()}
    kept = _predictions(options) | {name: row for name, row in made.items() if row is not None}
    write_text(options.folder / PREDICTIONS.name, json.dumps({"points": kept}, indent=1) + "\n")
    print(*(f"{name}: {row['verdict'] if row else 'needs a profile'}" for name, row in made.items()), sep="\n")
    return 0


def _predictions(options: argparse.Namespace) -> dict[str, Any]:
    file = options.folder / PREDICTIONS.name
    return dict(json.loads(file.read_text())["points"]) if file.exists() else {}


def run_all(options: argparse.Namespace) -> int:
    predicted = _predictions(options)
    missing = options.points.keys() - predicted.keys()
    print(*(f"{name}: has no prediction\n" for name in missing), sep="", end="")
    status = measure({name: predicted[name] for name in options.points if name in predicted}, options)
    return 1 if missing else status


def run_unswapped(options: argparse.Namespace) -> int:
    commands = {
        f"{name} unswapped": {"command": training_command(list(point.training_flags), [], 1, 1)}
        for name, point in options.points.items()
    }
    return measure(commands, options)


def measure(wanted: dict[str, dict[str, Any]], options: argparse.Namespace) -> int:
    """Run what has no row yet. Return 0 if all rows are there and within their budgets.

    ``wanted``: by name, the command, and what was predicted.
    """
    began = time.monotonic()
    old = json.loads(options.output.read_text()) if options.output.exists() else {}
    written: dict[str, Any] = {"date": now(), **facts(), **old}
    rows = written.setdefault("points", {})
    for name, one in wanted.items():
        if rows.get(name, {}).get("outcome") != "ok" and time.monotonic() - began < options.time_limit_s:
            rows[name] = run(one, options.limit_s)
            write_text(options.output, json.dumps(written, indent=1) + "\n")
            print(line(name, rows[name]), flush=True)
    done = [rows[name] for name in wanted if name in rows and rows[name]["outcome"] == "ok"]
    return 0 if len(done) == len(wanted) and all(row["is_within_budget"] for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
