"""The results of a benchmark: runs as they come in, merged to one row a case and method."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from proof.bench.methods import Method
from proof.bench.suite import Case, Suite, SuiteError
from proof.rows import Row, read_rows, write_rows

Run = dict[str, Any]
"""What one process has left: ``round``, ``outcome``, ``output_tail`` if it failed, else what it measured."""

REFERENCE = "none"
LARGEST = (
    "device_peak_gib", "device_reserved_gib", "device_static_gib", "host_peak_gib", "host_rss_growth_gib",
    "host_pinned_gib", "host_booked_gib", "host_leased_gib",
)  # fmt: skip
MEDIANS = ("first_step_ms", "build_ms", "wait_ms", "first_layer_forward_ms", "forward_ms", "backward_ms")
SAME = (
    "began_cuda_early", "num_params", "tokens_per_step", "step_flops", "swapped_out_bytes", "swapped_in_bytes",
    "num_late",
)  # fmt: skip


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
        flags = {(case.name, method.name): flags_of(case, method) for case in suite.cases for method in case.methods}
        for row in read_rows(path):
            key = row["case"], row["method"]
            expected = {field: self._common[field] for field in ("suite", "commit", "machine", "versions")}
            for field, value in {**expected, "flags": flags.get(key)}.items():
                if row[field] != value:
                    raise SuiteError(
                        f"--resume: {path} has {field} {row[field]!r} for {' '.join(key)}, this run has {value!r}: "
                        "rows of one file must be comparable. Name another --output."
                    )
            self._runs[key] = row["rounds"]

    def is_done(self, case: Case, method: Method, number: int) -> bool:
        """Round ``number`` was run, or an earlier one has failed: it would fail again."""
        runs = self._runs.get((case.name, method.name), [])
        return any(run["round"] == number or run["outcome"] != "ok" for run in runs)

    def add(self, case: Case, method: Method, run: Run) -> None:
        self._runs.setdefault((case.name, method.name), []).append({**run, "command": self._command})
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
                    rows.append({**self._named(case, method), **merged, "reference": reference and reference.name})
        return rows

    def _named(self, case: Case, method: Method) -> Row:
        return {
            **self._common,
            "case": case.name,
            "method": method.name,
            "what": method.what,
            "is_ours": method.is_ours,
            "flags": flags_of(case, method),
            "env": method.piece.env,
            "wrap": method.piece.wrap,
        }


def flags_of(case: Case, method: Method) -> str:
    """Exactly what the trainer got."""
    return " ".join(case.request(method).flags)


def _reference(runs: dict[Method, list[Run]]) -> Method | None:
    """The method whose losses the others are compared with: ``none``, or the first that worked where it did not."""
    worked = [method for method, mine in runs.items() if any(run["outcome"] == "ok" for run in mine)]
    return next((method for method in worked if method.name == REFERENCE), next(iter(worked), None))


def merge(runs: list[Run], reference: list[Run] | None) -> Row:
    """The measured part of a row, out of the rounds of one method and those of the reference.

    Step times of all rounds are one sample; of memory the worst round counts. Each round's losses are compared with the
    same round of the reference, and the reference's own with its first round: that is the noise of the machine.
    """
    good = [run for run in runs if run["outcome"] == "ok"]
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
