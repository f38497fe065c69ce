"""The results of a benchmark: runs as they come in, merged to one row a case and method."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from proof.bench.budgets import Memory, NotReady
from proof.bench.methods import Method
from proof.bench.suite import REFERENCE, Case, Suite, SuiteError
from proof.rows import NOT_READY, NOT_STABLE, UNPLANNED, Row, read_rows, write_rows
from proof.run.request import Request

Run = dict[str, Any]
"""What one process has left: ``round``, ``outcome``, ``output_tail`` if it failed, else what it measured."""

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
"""What rows are that do not say it: they are older than these fields."""


class Book:
    """The result file of a suite. Every run is written at once: whatever interrupts, what is done is kept.

    Args:
        suite: all of it, whatever part is run now.
        path: the file; with ``resume`` what it holds is taken over and not run again.
        facts: ``versions``, ``machine``, ``commit``, ``link``.
        command: the command line that makes the runs of now.

    Raises:
        SuiteError: the file exists and is not to be resumed, or is of another suite, commit, machine or flags.
    """

    def __init__(self, suite: Suite, path: Path, facts: dict[str, Any], command: str, *, resume: bool) -> None:
        self._suite = suite
        self._path = path
        self._common = {"suite": suite.name, **facts}
        self._command = command
        self._runs: dict[tuple[str, str], list[Run]] = {}
        if not path.exists():
            return
        if not resume:
            raise SuiteError(f"--output {path} exists: continue it with --resume, or name another file")
        rows = read_rows(path)
        # What was not ready may be by now.
        self._runs = {
            (row["case"], row["method"]): [
                {"link": row.get("link"), **run} for run in row["rounds"] if run["outcome"] != NOT_READY
            ]
            for row in rows
        }
        known = {(case.name, method.name): self._named(case, method) for case in suite.cases for method in case.methods}
        for row in rows:
            key = row["case"], row["method"]
            mine = known.get(key, {})
            fields = ["suite", "commit", "machine", "versions", "flags", "env", "peak", "sequence_schedule"]
            if row["outcome"] == NOT_READY:
                fields.remove("flags")  # budgets and plans may have become known
            for field in fields:
                value = self._common[field] if field in self._common else mine.get(field)
                there = row.get(field, EARLIER.get(field))
                if there != value:
                    raise SuiteError(
                        f"--resume: {path} has {field} {there!r} for {' '.join(key)}, this run has {value!r}: "
                        "rows of one file must be comparable. Name another --output."
                    )

    def is_done(self, case: Case, method: Method, number: int) -> bool:
        """Round ``number`` was run, or an earlier one has failed: it would fail again."""
        runs = self._runs.get((case.name, method.name), [])
        return any(run["round"] == number or run["outcome"] != "ok" for run in runs)

    def request(self, case: Case, method: Method) -> Request:
        """What the process of a run is told. Raises: ``NotReady``."""
        return case.request(method, self._memory(case))

    def _memory(self, case: Case) -> Memory | None:
        """What the first unswapped run of a case took. Later ones change no budget that others had already."""
        runs = [run for run in self._runs.get((case.name, REFERENCE), ()) if run["outcome"] == "ok"]
        if not runs:
            return None
        static_gib, peak_gib = runs[0].get("device_static_gib"), runs[0].get("device_peak_gib")
        if static_gib is not None and peak_gib is not None:
            return Memory(static_gib, peak_gib - static_gib)
        saved_gib = runs[0].get("saved_peak_gib")  # without a GPU a budget is of what autograd holds
        return None if saved_gib is None else Memory(0.0, saved_gib)

    def add(self, case: Case, method: Method, run: Run) -> None:
        self._runs.setdefault((case.name, method.name), []).append(
            {**run, "command": self._command, "link": self._common.get("link")}
        )
        write_rows(self._path, self.rows())

    def rows(self) -> list[Row]:
        """One row a case and method that was run, in the suite's order."""
        rows = []
        for case in self._suite.cases:
            runs = {method: self._runs.get((case.name, method.name), []) for method in case.methods}
            reference = _reference(runs)
            for method, mine in runs.items():
                if mine:
                    merged = merge(mine, runs[reference] if reference else None)
                    named = self._named(case, method)
                    link = mine[-1].get("link")  # of the machine that ran it, which need not be that of now
                    rows.append({**named, **merged, "link": link, "reference": reference and reference.name})
        return rows

    def _named(self, case: Case, method: Method) -> Row:
        return {
            **self._common,
            "case": case.name,
            "method": method.name,
            "what": method.what,
            "is_ours": method.is_ours,
            "flags": self._flags(case, method),
            "env": {**case.env, **method.piece.env},
            "wrap": method.piece.wrap,
            "peak": case.peak,
            "sequence_schedule": [list(part) for part in case.sequence_schedule],
        }

    def _flags(self, case: Case, method: Method) -> str:
        """Exactly what the trainer got; of what is not ready, what the suite says."""
        try:
            return " ".join(case.flags_of(method, self._memory(case)))
        except NotReady:
            return " ".join((*case.flags, *method.piece.flags))


def _reference(runs: dict[Method, list[Run]]) -> Method | None:
    """The method whose losses the others are compared with: ``none``, or the first that worked where it did not."""
    worked = [method for method, mine in runs.items() if any(run["outcome"] == "ok" for run in mine)]
    return next((method for method in worked if method.name == REFERENCE), next(iter(worked), None))


def merge(runs: list[Run], reference: list[Run] | None) -> Row:
    """The measured part of a row, out of the rounds of one method and those of the reference.

    Step times of all rounds are one sample; of memory the worst round counts; of what was planned the first (each round
    that searched has its own prediction), but the most re-plans. A run in which a timed step was not stable keeps its
    figures, its outcome says what they are worth. Each round's losses are compared with the
    same round of the reference, and the reference's own with its first round: that is the noise of the machine.
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
        "stages": None,
        "rounds": runs,
    }  # fmt: skip
    if not good:
        return row
    step_ms = [time_ms for run in good for time_ms in run["step_ms_all"]]
    median_ms = statistics.median(step_ms)
    row.update(
        step_ms_median=median_ms,
        step_ms_all=step_ms,
        step_ms_min=min(step_ms),
        step_ms_max=max(step_ms),
        step_ms_rounds=[run["step_ms_median"] for run in good],
        tokens_per_s=good[0]["tokens_per_step"] / median_ms * 1e3,
        model_tflops_per_s=good[0]["step_flops"] / median_ms / 1e9,
        losses=good[0]["losses"],
        loss_hex=good[0]["losses"][-1],
    )
    for fields, pick in ((LARGEST, max), (MEDIANS, statistics.median), (SAME, max)):
        for field in fields:
            values = [run[field] for run in good if run.get(field) is not None]
            row[field] = pick(values) if values else None
    found = [run["planning"] for run in good if run.get("planning")]
    if found:
        row.update({field: found[0][field] for field in (*UNPLANNED, "stages")})
        row["num_replans"] = max(planning["num_replans"] for planning in found)
    return row


def losses_against(runs: list[Run], reference: list[Run] | None) -> Row:
    """``losses_equal`` (to the bit) and ``loss_max_rel_diff``; null where there is nothing to compare."""
    if not runs or reference is None:
        return {"losses_equal": None, "loss_max_rel_diff": None}
    by_round = {run["round"]: run["losses"] for run in reference if run["outcome"] == "ok"}
    first = next(iter(by_round.values()))
    is_reference = runs[0]["losses"] is first
    pairs = [(run["losses"], first if is_reference else by_round.get(run["round"], first)) for run in runs]
    worst = 0.0
    for mine, theirs in pairs:
        # A slow method was stopped earlier: compared is what both have.
        for one, other in zip(map(float.fromhex, mine), map(float.fromhex, theirs), strict=False):
            worst = max(worst, _relative(one, other))
    return {"losses_equal": worst == 0.0, "loss_max_rel_diff": worst}


def _relative(one: float, other: float) -> float:
    """Infinite where no number tells the difference (a loss that is none, or nought)."""
    if one == other:
        return 0.0
    difference = abs(one - other) / abs(other) if other else math.inf
    return math.inf if math.isnan(difference) else difference
