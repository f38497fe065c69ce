"""The results of a sweep: rows of finished runs, and the run to make next."""

import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.machine import now
from benchmarks.rows import GIB, MIB, NOT_FALLING, NOT_STABLE, PRUNED, UNPLANNED, WORDS, Row, check_sweep_row, outcome
from benchmarks.runner.grid import Run
from benchmarks.runner.planning import stages_text
from benchmarks.runner.request import Request
from benchmarks.store import ResultStore
from benchmarks.sweeps.forecast import Tiers
from benchmarks.sweeps.search import following
from benchmarks.sweeps.sweep import Sweep, Trial
from megatron.swap.forecast.gpus import GPUS, Gpu

MEASURED = (
    "step_ms_median", "step_ms_all", "first_step_ms", "build_ms", "tokens_per_step", "step_flops", "num_params",
    "device_peak_gib", "device_reserved_gib", "device_static_gib", "host_peak_gib", "host_rss_growth_gib",
    "host_pinned_gib", "disk_peak_gib", "swapped_out_bytes", "swapped_in_bytes", "num_late", "wait_ms",
    "optimizer_out_bytes", "optimizer_in_bytes", "losses", "began_cuda_early", "alloc_retries_by_step",
)  # fmt: skip
COMPARABLE = ("suite", "commit", "machine", "versions", "flags", "env", "warm_up")
"""Fields that must be equal in all rows of one file."""
ANY_GPU = next(iter(GPUS.values()))
"""The memory model's stand-in for a GPU that is not in the table: predicted memory hardly depends on speed."""
EXPECTED_RUNS = 3  # Expected runs of a method: one that trains, one that does not, one for an error of the memory model


@dataclass(frozen=True)
class Scene:
    facts: dict[str, Any]
    tiers: Tiers
    gpu: Gpu | None
    command: str


class SweepResults:
    def __init__(self, sweep: Sweep, methods: Iterable[str], path: Path | None, scene: Scene, *, resume: bool) -> None:
        self._sweep, self._methods, self.scene = sweep, list(methods), scene
        self.on_gpu, self.time_limit_s, self.host_limit_gib = sweep.on_gpu, sweep.time_limit_s, sweep.host_limit_gib
        model = scene.gpu or (ANY_GPU if scene.tiers.device is not None else None)
        self.trial: Callable[[str, int], Trial] = cache(
            lambda name, place: sweep.trial(name, place, scene.tiers, model)
        )
        self._numbers = [value.number for value in sweep.values]
        self._store = ResultStore(path, resume=resume, check=check_sweep_row)
        for row in self._store.rows:
            self._check_resumed(row)

    def _check_resumed(self, row: Row) -> None:
        if row["method"] not in self._sweep.methods or row["value"] not in self._numbers:
            raise self._store.refuse(f"{row['method']} {row['case']}, which sweep {self._sweep.name} has not")
        if row["outcome"] == PRUNED:
            return  # `finish` writes such rows anew
        trial = self.trial(row["method"], self._numbers.index(row["value"]))
        mine = {**self.scene.facts, **self._named(trial)}
        now = {field: mine[field] for field in COMPARABLE}
        self._store.require_same(trial.label, {**now, **row}, now)  # older rows lack some of the fields

    def start(self, name: str) -> int:
        places = range(self.count(name))
        return max(0, bisect_left(places, True, key=lambda at: not self.trial(name, at).forecast.fits) - 1)

    def count(self, name: str) -> int:
        places = range(len(self._numbers))
        return bisect_left(places, True, key=lambda at: self.trial(name, at).forecast.excess is not None)

    def next_trial(self, name: str) -> Trial | None:
        count = self.count(name)
        tried = self._tried(name)
        if count == 0 or any(outcome.startswith("missing") for outcome in tried.values()):
            return None
        trained = {at: outcome == "ok" for at, outcome in tried.items() if at < count}
        start = self.start(name)
        place = following(count, start, trained, trusted=not self.trial(name, start).forecast.is_bound)
        return None if place is None else self.trial(name, place)

    def todo(self) -> list[Trial]:
        for name in self._methods:
            trial = self.next_trial(name)
            if trial is not None:
                return [trial]
            self.finish(name)
        return []

    def num_left(self) -> int:
        left = [name for name in self._methods if self.next_trial(name) is not None]
        return sum(max(1, EXPECTED_RUNS - len(self._tried(name))) for name in left)

    def _tried(self, name: str) -> dict[int, str]:
        mine = [row for row in self._store.rows if row["method"] == name and row["outcome"] != PRUNED]
        return {self._numbers.index(row["value"]): row["outcome"] for row in mine}

    def request(self, trial: Trial) -> Request:
        return self._sweep.request(trial)

    def add(self, trial: Trial, run: Run, seconds: float) -> str:
        found, tail = run["outcome"], run.get("output_tail")
        if found == "ok" and run["step_ms_median"] is None:  # unstable steps are left out, and no other was timed
            stages = stages_text(run["planning"])
            found, tail = NOT_STABLE, f"no timed step was stable: raise num_steps. Stages: {stages}"
        about = {"outcome": found, "output_tail": tail, "why": None, "run_s": seconds, "date": now()}
        row = {**self._named(trial), **about, **measured(run, self.scene.gpu)}
        if found == "ok" and not row["loss_last"] < row["loss_first"]:
            row["outcome"] = NOT_FALLING
        self._store.replace(self._ordered([*self._store.rows, row]))
        return f"{trial.label}: {_words(row)} ({seconds:.0f} s)"

    def finish(self, name: str) -> None:
        rows = [row for row in self._store.rows if (row["method"], row["outcome"]) != (name, PRUNED)]
        values, count, tried = self._sweep.values, self.count(name), self._tried(name)
        best = max((at for at, outcome in tried.items() if outcome == "ok"), default=-1)
        failed = min((at for at, outcome in tried.items() if outcome != "ok" and at > best), default=None)
        if failed is not None:
            why = WORDS.get(tried[failed], tried[failed])
            beyond = [at for at in range(failed + 1, count) if at not in tried]
            rows += self._pruned(name, beyond, f"{values[failed].label} did not train ({why}): nothing larger is tried")
        if count < len(values):
            forecast = self.trial(name, count).forecast
            assert forecast.excess is not None
            what = "takes at least" if forecast.is_bound else "is predicted to take"
            why = f"{values[count].label} {what} {forecast.excess.text}"
            rows += self._pruned(name, list(range(count, len(values))), why)
        self._store.replace(self._ordered(rows))

    def _pruned(self, name: str, places: list[int], why: str) -> list[Row]:
        if not places:
            return []
        about = {"outcome": PRUNED, "output_tail": None, "why": why, "run_s": None, "date": now()}
        values = [self._numbers[at] for at in places]
        return [{**self._named(self.trial(name, places[0])), **about, "values": values, **measured({}, None)}]

    def _named(self, trial: Trial) -> Row:
        tiers = self.scene.tiers
        return {
            "suite": self._sweep.name, **self.scene.facts, "command": self.scene.command,
            "case": trial.value.label, "method": trial.method.name, "what": trial.method.what,
            "is_ours": trial.method.is_ours, "flags": " ".join(trial.flags), "wrap": trial.method.piece.wrap,
            "env": {**self._sweep.env, **trial.method.piece.env},
            "axis": self._sweep.axis_name, "unit": self._sweep.axis.unit, "value": trial.value.number,
            "values": [trial.value.number], "params": trial.params, "param_bytes": trial.param_bytes,
            "predicted": trial.forecast.as_row(),
            "warm_up": self._sweep.num_warm_up, "time_limit_s": self._sweep.time_limit_s,
            "host_limit_gib": self._sweep.host_limit_gib,
            "tiers_gib": {"device": tiers.device, "host": tiers.host, "disk": tiers.disk},
        }  # fmt: skip

    def rows(self) -> list[Row]:
        return self._ordered(self._store.rows)

    def _ordered(self, rows: Iterable[Row]) -> list[Row]:
        order = list(self._sweep.methods)
        return sorted(rows, key=lambda row: (order.index(row["method"]), row["value"]))


def _words(row: Row) -> str:
    if row["outcome"] != "ok":
        return outcome(row)
    if row["tiers_gib"]["device"] is None:  # times of a CPU say nothing
        device = row["device_peak_gib"]
        return "trains" + ("" if device is None else f", {device * GIB / MIB:.1f} MiB of emulated device memory")
    peaks = [("device", row["device_peak_gib"]), ("host", row["host_peak_gib"]), ("disk", row["disk_peak_gib"])]
    used = ", ".join(f"{tier} {gib:.2f} GiB" for tier, gib in peaks if gib is not None)
    return f"trains, {row['tokens_per_s']:,.0f} tokens/s, {used}"


def measured(result: dict[str, Any], gpu: Gpu | None) -> Row:
    row: Row = {field: result.get(field) for field in MEASURED}
    losses, median_ms = [float.fromhex(loss) for loss in row["losses"] or ()], row["step_ms_median"]
    quarter = max(1, len(losses) // 4)
    planning = result.get("planning") or {}
    tflops = row["step_flops"] / median_ms / 1e9 if median_ms else None
    return {
        **row,
        **{field: planning.get(field) for field in (*UNPLANNED, "stages")},
        "losses_equal": None,
        "loss_hex": row["losses"][-1] if losses else None,
        "loss_first": statistics.mean(losses[:quarter]) if losses else None,
        "loss_last": statistics.mean(losses[-quarter:]) if losses else None,
        "tokens_per_s": row["tokens_per_step"] / median_ms * 1e3 if median_ms else None,
        "model_tflops_per_s": tflops,
        "mfu": tflops / gpu.peak_tflops if tflops and gpu else None,
    }
