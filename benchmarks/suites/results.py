"""The results of a suite: finished runs, merged into one row for each case and method."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import now
from benchmarks.rows import GIB, MIB, NOT_READY, NOT_STABLE, PEAKS, UNPLANNED, Row
from benchmarks.runner.grid import Run
from benchmarks.runner.planning import stages_text
from benchmarks.runner.request import NotReady, Request
from benchmarks.store import ResultStore
from benchmarks.suites.budgets import Memory
from benchmarks.suites.methods import Method
from benchmarks.suites.suite import REFERENCE, Case, Suite

LARGEST = (
    "device_peak_gib", "device_reserved_gib", "device_static_gib", "host_peak_gib", "host_rss_growth_gib",
    "host_pinned_gib", "host_booked_gib", "host_leased_gib", "saved_peak_gib",
)  # fmt: skip
MEDIANS = ("first_step_ms", "build_ms", "wait_ms", "first_layer_forward_ms", "forward_ms", "backward_ms")
SAME = (
    "began_cuda_early", "num_params", "tokens_per_step", "step_flops", "swapped_out_bytes", "swapped_in_bytes",
    "optimizer_out_bytes", "optimizer_in_bytes", "num_late",
)  # fmt: skip
EARLIER: Row = {"peak": "allocated", "sequence_schedule": []}
"""Values for rows that were written before these fields existed."""


@dataclass(frozen=True)
class Item:
    case: Case
    method: Method
    number: int  # Round, from 1

    @property
    def label(self) -> str:
        return f"{self.case.name} {self.method.name} round {self.number}"

    @property
    def requires(self) -> tuple[str, ...]:
        return self.method.piece.requires


class SuiteResults:
    """The runs of a suite and their rows. ``chosen``: the part of ``suite`` that this program runs."""

    def __init__(
        self, suite: Suite, chosen: Suite, path: Path, facts: dict[str, Any], command: str, *, resume: bool
    ) -> None:
        self._suite, self._chosen = suite, chosen
        self.on_gpu, self.time_limit_s, self.host_limit_gib = suite.on_gpu, suite.time_limit_s, suite.host_limit_gib
        self._store = ResultStore(path, resume=resume)
        self._common = {"suite": suite.name, **facts}
        self._command = command
        # Runs that were not ready are dropped: they may be ready now.
        self._runs: dict[tuple[str, str], list[Run]] = {
            (row["case"], row["method"]): [
                {"link": row.get("link"), **run} for run in row["rounds"] if run["outcome"] != NOT_READY
            ]
            for row in self._store.rows
        }
        self._check_resumed()

    def _check_resumed(self) -> None:
        suite = self._suite
        known = {(case.name, method.name): self._named(case, method) for case in suite.cases for method in case.methods}
        for row in self._store.rows:
            key = row["case"], row["method"]
            mine = known.get(key, {})
            fields = ["suite", "commit", "machine", "versions", "flags", "env", "peak", "sequence_schedule"]
            if row["outcome"] == NOT_READY:
                fields.remove("flags")  # budgets and plans may have become known
            there = {field: row.get(field, EARLIER.get(field)) for field in fields}
            now = {field: self._common.get(field, mine.get(field)) for field in fields}
            self._store.require_same(" ".join(key), there, now)

    def todo(self) -> list[Item]:
        items = [
            Item(case, method, number)
            for case in self._chosen.cases
            for number in range(1, case.rounds + 1)
            for method in case.methods
        ]
        return [item for item in items if not self._is_done(item)]

    def num_left(self) -> int:
        return len(self.todo())

    def _is_done(self, item: Item) -> bool:
        """Return whether the round was run, or an earlier round failed (a later one would fail too)."""
        runs = self._runs.get((item.case.name, item.method.name), [])
        return any(run["round"] == item.number or run["outcome"] != "ok" for run in runs)

    def request(self, item: Item) -> Request:
        return item.case.request(item.method, self._memory(item.case))

    def _memory(self, case: Case) -> Memory | None:
        """Return the memory of the case's first unswapped run; later rounds must not change budgets in use."""
        runs = [run for run in self._runs.get((case.name, REFERENCE), ()) if run["outcome"] == "ok"]
        if not runs:
            return None
        static_gib, peak_gib = runs[0].get("device_static_gib"), runs[0].get("device_peak_gib")
        if static_gib is not None and peak_gib is not None:
            return Memory(static_gib, peak_gib - static_gib)
        saved_gib = runs[0].get("saved_peak_gib")  # without a GPU a budget limits the saved tensors
        return None if saved_gib is None else Memory(0.0, saved_gib)

    def add(self, item: Item, run: Run, seconds: float) -> str:
        if run.get("unstable_steps"):
            stages = stages_text(run["planning"])
            why = f"steps {run['unstable_steps']} were timed and not stable: begin later (warm_up_auto)."
            run |= {"outcome": NOT_STABLE, "output_tail": f"{why} Stages: {stages}"}
        about = {"round": item.number, "command": self._command, "link": self._common.get("link"), "date": now()}
        self._runs.setdefault((item.case.name, item.method.name), []).append({**run, **about})
        self._store.replace(self.rows())
        return f"{item.label}: {_words(item, run)} ({seconds:.0f} s)"

    def rows(self) -> list[Row]:
        rows = []
        for case in self._suite.cases:
            runs = {method: self._runs.get((case.name, method.name), []) for method in case.methods}
            worked = [method for method, mine in runs.items() if any(run["outcome"] == "ok" for run in mine)]
            reference = next((method for method in worked if method.name == REFERENCE), next(iter(worked), None))
            for method, mine in runs.items():
                if mine:
                    merged = merge(mine, runs[reference] if reference else None)
                    named = self._named(case, method)
                    # Of the last run: a resumed file may come from several machines and days.
                    last: Row = {field: mine[-1][field] for field in ("link", "date") if field in mine[-1]}
                    rows.append({**named, **merged, **last, "reference": reference and reference.name})
        return rows

    def _named(self, case: Case, method: Method) -> Row:
        return {
            **self._common, "case": case.name, "method": method.name, "what": method.what, "is_ours": method.is_ours,
            "flags": self._flags(case, method), "env": {**case.env, **method.piece.env}, "wrap": method.piece.wrap,
            "peak": case.peak, "sequence_schedule": [list(part) for part in case.sequence_schedule],
        }

    def _flags(self, case: Case, method: Method) -> str:
        try:
            return " ".join(case.flags_of(method, self._memory(case)))
        except NotReady:
            return " ".join((*case.flags, *method.piece.flags))


def _words(item: Item, run: Run) -> str:
    peak = run.get(PEAKS[item.case.peak])
    if run["outcome"] != "ok":
        return str(run["outcome"])
    if item.case.peak == "saved":
        return "trains" if peak is None else f"autograd holds {peak * GIB / MIB:.1f} MiB"
    device = "" if peak is None else f", peak {peak:.2f} GiB"
    return f"step {run['step_ms_median']:.1f} ms{device}, host {run['host_peak_gib']:.2f} GiB"


def merge(runs: list[Run], reference: list[Run] | None) -> Row:
    """Merge the rounds of one method into the measured part of a row.

    Step times of all rounds are one sample. Memory figures are those of the worst round. Predictions are those of the
    first round, since each round searches for its own plan; `num_replans` is the largest of all rounds. A run with
    an unstable timed step keeps its figures, and its outcome says so; without a stable one it has no times. Losses are
    compared with the same round of the reference. The reference is compared with its own first round, which shows the
    machine's noise.
    """
    good = [run for run in runs if run["outcome"] in ("ok", NOT_STABLE)]
    failed = next((run for run in runs if run["outcome"] != "ok"), None)
    row: Row = {
        "outcome": failed["outcome"] if failed else "ok",
        "output_tail": failed["output_tail"] if failed else None,
        "num_rounds": len(good),
        "command": runs[-1]["command"],
        "step_ms_median": None, "step_ms_all": None, "step_ms_min": None, "step_ms_max": None,
        "step_ms_rounds": None, "tokens_per_s": None, "model_tflops_per_s": None, "losses": None, "loss_hex": None,
        **dict.fromkeys((*LARGEST, *MEDIANS, *SAME)),
        **losses_against(good, reference),
        **UNPLANNED,
        "lower_bound_ms": None,
        "stages": None,
        "rounds": runs,
    }  # fmt: skip
    if not good:
        return row
    step_ms = [time_ms for run in good for time_ms in run["step_ms_all"]]
    row |= {"step_ms_all": step_ms, "step_ms_rounds": [run["step_ms_median"] for run in good]}
    row |= {"losses": good[0]["losses"], "loss_hex": good[0]["losses"][-1]}
    if step_ms:  # empty where no timed step was stable
        median_ms = statistics.median(step_ms)
        row |= {"step_ms_median": median_ms, "step_ms_min": min(step_ms), "step_ms_max": max(step_ms)}
        row["tokens_per_s"] = good[0]["tokens_per_step"] / median_ms * 1e3
        row["model_tflops_per_s"] = good[0]["step_flops"] / median_ms / 1e9
    for fields, pick in ((LARGEST, max), (MEDIANS, statistics.median), (SAME, max)):
        for field in fields:
            values = [run[field] for run in good if run.get(field) is not None]
            row[field] = pick(values) if values else None
    found = [run["planning"] for run in good if run.get("planning")]
    if found:
        row |= {field: found[0][field] for field in (*UNPLANNED, "stages")}
        row["lower_bound_ms"] = found[0].get("lower_bound_ms")
        row["num_replans"] = max(planning["num_replans"] for planning in found)
    return row


def losses_against(runs: list[Run], reference: list[Run] | None) -> Row:
    if not runs or reference is None:
        return {"losses_equal": None, "loss_max_rel_diff": None}
    by_round = {run["round"]: run["losses"] for run in reference if run["outcome"] == "ok"}
    first = next(iter(by_round.values()))
    is_reference = runs[0]["losses"] is first
    pairs = [(run["losses"], first if is_reference else by_round.get(run["round"], first)) for run in runs]
    # A slow method makes fewer steps: only the steps that both made are compared.
    steps = [step for mine, theirs in pairs for step in zip(mine, theirs, strict=False)]
    worst = max((_relative(float.fromhex(one), float.fromhex(other)) for one, other in steps), default=0.0)
    return {"losses_equal": worst == 0.0, "loss_max_rel_diff": worst}


def _relative(one: float, other: float) -> float:
    if one == other:
        return 0.0
    difference = abs(one - other) / abs(other) if other else math.inf
    return math.inf if math.isnan(difference) else difference
