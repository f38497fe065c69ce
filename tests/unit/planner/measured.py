"""Predictions beside measurements.

``python -m tests.unit.planner.measured`` prints two tables of docs/dev/planner.md.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.sweeps.plans import plan_of, with_mlp_section
from megatron.swap.common.plan import load_plan
from megatron.swap.forecast.flags import Training, read_flags
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.options import FULL, NOTHING, states_on, weight_gradients_gib, without_planner
from megatron.swap.forecast.shape import non_layer_scaled, params_of_rank, scaled, shape_profile, with_megatrons_loss
from megatron.swap.planner.profile import Link, Profile
from megatron.swap.planner.simulate import Prediction, simulate
from megatron.swap.planner.state_fraction import with_fraction

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
FILES = ("h200-dense.jsonl", "h200-long-context.jsonl", "h200-overhead.jsonl")
WRAPPED = ("save-on-cpu", "torchtune-offload", "torchtune-offload-one-stream", "deepspeed-checkpoint")
"""Baselines that are not chosen by flags."""
STATIC_GIB_OF_OVERHEAD = {"L16-h4096": 58.774}
"""Static memory for rows of h200-overhead.jsonl, which lack it. It was measured in h200-dense.jsonl."""


@dataclass(frozen=True)
class Compared:
    """One measured run and its prediction."""

    file: str
    case: str
    method: str
    row: dict[str, Any]
    predicted: Prediction
    times_measured: bool
    """Whether the times of forward and backward are measured ones of the unswapped run; else they are estimates."""

    @property
    def peak_error(self) -> float:
        return self.predicted.peak_gib / self.row["device_peak_gib"] - 1

    @property
    def step_error(self) -> float:
        return self.predicted.step_ms / self.row["step_ms_median"] - 1


def compared(file: str) -> Iterator[Compared]:
    """Yield every finished run of ours, and of Megatron's recomputation as far as the model can express it."""
    rows = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    for row in rows:
        case = row["case"].split()[0]
        flags = row["flags"].split()
        training = read_flags(flags)
        plan = None if row["method"] in WRAPPED else plan_of(training.model, flags)
        if row["outcome"] != "ok" or plan is None:
            continue
        profile = allocated(training)
        static = row["device_static_gib"] or STATIC_GIB_OF_OVERHEAD.get(case)
        if static:
            profile = replace(profile, static_gib=static)
        profile = with_mlp_section(with_megatrons_loss(profile))
        link = row["link"]
        profile = replace(profile, link=Link(link["d2h_gb_s"], link["h2d_gb_s"], 49.0, 49.0))
        none = next((one for one in rows if one["case"] == row["case"] and one["method"] == "none"), None)
        measured = none is not None and none["outcome"] == "ok"
        if none is not None and measured:
            profile = with_measured_times(profile, none["forward_ms"], none["backward_ms"], none["step_ms_median"])
        yield Compared(file, case, row["method"], row, simulate(profile, plan), measured)


def with_measured_times(profile: Profile, forward_ms: float, backward_ms: float, step_ms: float) -> Profile:
    """Return ``profile`` with its times scaled so that a micro-batch's forward and backward equal the measured ones."""
    non_layer, layers = profile.non_layer, profile.layers
    forward = forward_ms / (non_layer.forward_ms + sum(len(e.layers) * e.forward_ms for e in layers))
    backward = backward_ms / (non_layer.backward_ms + sum(len(e.layers) * e.backward_ms for e in layers))
    rest = max(0.0, step_ms - profile.num_micro_batches * (forward_ms + backward_ms))
    return replace(
        profile,
        non_layer=replace(non_layer_scaled(non_layer, forward, backward), optimizer_ms=rest),
        layers=tuple(scaled(entry, forward, backward) for entry in layers),
    )


def allocated(training: Training) -> Profile:
    """Return the profile by arithmetic whose peaks are allocated memory, as those of the rows: without fragments."""
    profile = shape_profile(training.model, find_gpu("h200"), training.num_micro_batches, tied=training.tied)
    return replace(profile, allocator_gib=0.0)


ALONE = {"none": NOTHING, "full-recompute": FULL}
"""Methods of Megatron alone, and the options of plan that predict them."""


@dataclass(frozen=True)
class Alone:
    """A measured run of Megatron alone and its prediction, in GiB of reserved memory.

    Attributes:
        is_fused: weight gradients are added to ``main_grad`` by the matrix product.
        changes: the lengths of sequences change from step to step.
    """

    case: str
    num_micro_batches: int
    method: str
    is_fused: bool
    measured_gib: float
    predicted_gib: float
    changes: bool

    @property
    def error(self) -> float:
        return self.predicted_gib / self.measured_gib - 1


def alone() -> Iterator[Alone]:
    """Yield every finished run without swapping and with Megatron's full recomputation of a dense model on one GPU."""
    for path in sorted(RESULTS.glob("h200-*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if row.get("method") not in ALONE or row["outcome"] != "ok" or "--num-experts" in row["flags"]:
                continue
            training = read_flags(row["flags"].split())
            found = without_planner_of(training)
            yield Alone(
                row["case"].split(" transformer")[0], training.num_micro_batches, row["method"],
                training.fuses_gradients, row["device_reserved_gib"], found[ALONE[row["method"]]],
                bool(row.get("sequence_schedule")),
            )  # fmt: skip


def without_planner_of(training: Training) -> dict[str, float]:
    """Return the reserved memory of the options without Megatron Swap, in GiB, by their names."""
    gpu = find_gpu("h200")
    states = replace(states_on(training, gpu), offload_fraction=0.0, is_auto=False)
    profile = shape_profile(
        training.model, gpu, training.num_micro_batches, tied=training.tied, states=states,
        fuses_gradients=training.fuses_gradients,
    )  # fmt: skip
    gradients_gib = weight_gradients_gib(training, params_of_rank(training.model, training.tied))
    found = without_planner(with_megatrons_loss(profile), 0.0, None, gradients_gib)
    return {one.name: one.device_gib for one in found}


def reserved() -> Iterator[str]:
    """Yield Markdown rows: reserved memory of Megatron alone, predicted and measured, equal runs once."""
    yield "| case | micro-batches | run | reserved GiB: predicted | measured | error |"
    yield "|---|---|---|---|---|---|"
    rows = {
        f"| {one.case} | {one.num_micro_batches} | `{one.method}`{', fused' * one.is_fused} | "
        f"{one.predicted_gib:.2f} | {one.measured_gib:.2f} | {100 * one.error:+.1f} % |": None
        for one in alone()
    }  # fmt: skip
    yield from rows


def errors() -> Iterator[str]:
    """Yield Markdown rows: the largest error of each case, relative to the measured figure, and the run that has it."""
    yield "| file | case | runs | largest error of the peak | run | largest error of the step | run |"
    yield "|---|---|---|---|---|---|---|"
    for file in FILES:
        cases: dict[str, list[Compared]] = {}
        for one in compared(file):
            cases.setdefault(one.case, []).append(one)
        for case, runs in cases.items():
            peak = max(runs, key=lambda one: abs(one.peak_error))
            step = max(runs, key=lambda one: abs(one.step_error))
            yield (
                f"| {file.removesuffix('.jsonl')} | {case} | {len(runs)} | {100 * peak.peak_error:+.2f} % | "
                f"`{peak.method}` | {100 * step.step_error:+.1f} % | `{step.method}` |"
            )


POINTS = RESULTS / "h200-plan-points.json"
AS_PLANNED = (
    "dense-roomy", "dense-tight", "wide", "grouped-queries", "80-gb", "32k", "8b-8k", "8b-64k", "dense-1.3b", "128k",
)  # fmt: skip
"""Points from shapes whose last run followed the plan file that docs/results/plan-points has."""


def pasted() -> Iterator[tuple[str, dict[str, Any], Prediction]]:
    """Yield the last run of each point of ``AS_PLANNED``, and what is predicted of its plan today."""
    rows: dict[str, Any] = {}
    for call in json.loads(POINTS.read_text())["calls"]:
        rows |= call["points"]
    predictions = json.loads((RESULTS / "plan-points" / "predictions.json").read_text())["points"]
    for name in AS_PLANNED:
        training = read_flags(shlex.split(predictions[name]["plan"].partition(" -- ")[2]))
        plan = load_plan(RESULTS / "plan-points" / f"{name}.json")
        profile = shape_profile(
            training.model, find_gpu("h200"), training.num_micro_batches, tied=training.tied, states=training.states
        )
        if plan.offload_fraction is not None and profile.offloaded_state is not None:
            profile = with_fraction(profile, plan.offload_fraction)
        yield name, rows[name], simulate(profile, plan)


if __name__ == "__main__":
    print("\n".join([*errors(), "", *reserved()]))
