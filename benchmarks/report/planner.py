"""Planned runs: what was predicted beside what was measured, the budget, the unswapped run, the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import compare
from benchmarks.report.flags import is_ours, is_planned, value
from benchmarks.report.tables import name
from benchmarks.report.text import ABSENT, Table, cell_gib, cell_ms, cell_number, cell_ratio, cell_signed_share
from benchmarks.rows import Row, peak_gib
from benchmarks.runner.planning import PLAN_FLAG
from benchmarks.suites import losses


@dataclass(frozen=True)
class Point:
    """A run that worked and had a budget."""

    row: Row
    none: Row | None
    """The unswapped run of its case."""
    peer: Row | None
    """The fastest peer that fits the budget."""

    @property
    def peak_error(self) -> float | None:
        """By which share of the measured peak the predicted one is too high."""
        return _error(self.row["predicted_peak_gib"], peak_gib(self.row))

    @property
    def step_error(self) -> float | None:
        """The same of the step time."""
        return _error(self.row["predicted_step_ms"], self.row["step_ms_median"])

    @property
    def is_within(self) -> bool | None:
        """Whether the measured peak is no higher than the budget."""
        measured = peak_gib(self.row)
        return None if measured is None else measured <= self.row["budget_gib"]

    @property
    def plan(self) -> str:
        """Where the plan came from."""
        path = value(self.row, PLAN_FLAG)
        return f"`{Path(path).name}`" if path else "found in the run"


def points(rows: Sequence[Row]) -> list[Point]:
    """The planned runs of one case, from the largest budget to the smallest."""
    planned = [row for row in rows if row["outcome"] == "ok" and row["budget_gib"] is not None]
    none = next((row for row in compare.points(rows) if row["method"] == "none"), None)
    peers = [row for row in losses.comparable(rows) if not is_ours(row) and not _saves_nothing(row)]
    ordered = sorted(planned, key=lambda row: (-row["budget_gib"], row["method"]))
    return [Point(row, none, compare.fastest_within(peers, row["budget_gib"])) for row in ordered]


def failed(rows: Sequence[Row]) -> list[Row]:
    """The planned runs of one case that are no points."""
    return [row for row in rows if is_planned(row) and row["outcome"] != "ok"]


def points_table(found: Sequence[Point], rows: Sequence[Row]) -> Table:
    """``rows``: all of the case, which tell the noise of its losses."""
    head = [
        "our point", "plan", "budget GiB", "peak GiB: predicted", "measured", "off by", "within budget",
        "step ms: predicted", "measured", "off by", "× none", "best peer within the budget", "its × none", "re-plans",
        "losses",
    ]  # fmt: skip
    noise = losses.loss_noise(rows)
    lines = []
    for point in found:
        row, peer = point.row, point.peer
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
            "none of those measured" if peer is None else str(peer["method"]),
            cell_ratio(None if peer is None else _ratio(peer, point.none)),
            cell_number(row["num_replans"]),
            losses.cell(row, noise) or ABSENT,
        ])  # fmt: skip
    return Table(head, lines)


def largest(errors: Sequence[float | None]) -> float | None:
    """The largest error, whichever way it goes."""
    return max((abs(error) for error in errors if error is not None), default=None)


def _saves_nothing(row: Row) -> bool:
    return row["method"] in ("none", losses.REPEAT)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0


def _ratio(row: Row, none: Row | None) -> float | None:
    return None if none is None else float(row["step_ms_median"] / none["step_ms_median"])
