"""Planned runs: prediction against measurement, budget, unswapped run and baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flags import is_ours, is_planned, value
from benchmarks.report import compare
from benchmarks.report.tables import name
from benchmarks.report.text import ABSENT, Table, cell_gib, cell_ms, cell_number, cell_ratio, cell_signed_share
from benchmarks.rows import Row, peak_gib
from benchmarks.runner.planning import PLAN_FLAG
from benchmarks.suites import losses


@dataclass(frozen=True)
class Point:
    """A successful run that had a budget."""

    row: Row
    none: Row | None
    """The unswapped run of its case."""
    baseline: Row | None
    """The fastest baseline that fits the budget."""

    @property
    def peak_error(self) -> float | None:
        """Return predicted ÷ measured peak, minus 1."""
        return _error(self.row["predicted_peak_gib"], peak_gib(self.row))

    @property
    def step_error(self) -> float | None:
        """Return predicted ÷ measured step time, minus 1."""
        return _error(self.row["predicted_step_ms"], self.row["step_ms_median"])

    @property
    def above_bound(self) -> float | None:
        """Return measured step time ÷ what no plan is below in the planner's model, minus 1; ``None``: not known."""
        return _error(self.row["step_ms_median"], self.row.get("lower_bound_ms"))

    @property
    def is_within(self) -> bool | None:
        """Return whether the measured peak is within the budget; ``None``: not measured."""
        measured = peak_gib(self.row)
        return None if measured is None else measured <= self.row["budget_gib"]

    @property
    def plan(self) -> str:
        """Return where the plan came from."""
        path = value(self.row, PLAN_FLAG)
        return f"`{Path(path).name}`" if path else "found in the run"


def points(rows: Sequence[Row]) -> list[Point]:
    """Return the successful planned runs of one case, from the largest budget to the smallest."""
    planned = [row for row in rows if row["outcome"] == "ok" and row["budget_gib"] is not None]
    none = next((row for row in compare.points(rows) if row["method"] == "none"), None)
    baselines = [row for row in losses.comparable(rows) if not is_ours(row) and not _saves_nothing(row)]
    ordered = sorted(planned, key=lambda row: (-row["budget_gib"], row["method"]))
    return [Point(row, none, compare.fastest_within(baselines, row["budget_gib"])) for row in ordered]


def failed(rows: Sequence[Row]) -> list[Row]:
    """Return the planned runs of one case that failed."""
    return [row for row in rows if is_planned(row) and row["outcome"] != "ok"]


def points_table(found: Sequence[Point], rows: Sequence[Row]) -> Table:
    """Build the table of planned runs. ``rows``: all rows of the case, from which the noise of losses is estimated."""
    head = [
        "our point", "plan", "budget GiB", "peak GiB: predicted", "measured", "error", "within budget",
        "step ms: predicted", "measured", "error", "× none", "best baseline within the budget", "its × none",
        "re-plans", "losses",
    ]  # fmt: skip
    after = head.index("× none")
    has_bounds = any(point.above_bound is not None for point in found)
    if has_bounds:
        head[after:after] = ["no plan below, ms", "measured above it"]
    noise = losses.loss_noise(rows)
    lines = []
    for point in found:
        row, baseline = point.row, point.baseline
        lines.append([
            name(row),
            point.plan,
            cell_gib(row["budget_gib"]),
            cell_gib(row["predicted_peak_gib"]),
            cell_gib(peak_gib(row)),
            cell_signed_share(point.peak_error),
            {None: ABSENT, True: "yes", False: "**no**"}[point.is_within],
            cell_ms(row["predicted_step_ms"]),
            cell_ms(row["step_ms_median"]),
            cell_signed_share(point.step_error),
            cell_ratio(_ratio(row, point.none)),
            "no baseline fits" if baseline is None else str(baseline["method"]),
            cell_ratio(None if baseline is None else _ratio(baseline, point.none)),
            cell_number(row["num_replans"]),
            losses.cell(row, noise) or ABSENT,
        ])  # fmt: skip
        if has_bounds:
            lines[-1][after:after] = [cell_ms(row.get("lower_bound_ms")), cell_signed_share(point.above_bound)]
    return Table(head, lines)


def largest(errors: Sequence[float | None]) -> float | None:
    """Return the largest absolute error; ``None``: none is known."""
    return max((abs(error) for error in errors if error is not None), default=None)


def _saves_nothing(row: Row) -> bool:
    return row["method"] in ("none", losses.REPEAT)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0


def _ratio(row: Row, none: Row | None) -> float | None:
    return None if none is None else float(row["step_ms_median"] / none["step_ms_median"])
