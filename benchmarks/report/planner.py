"""Planned runs: prediction against measurement, budget, unswapped run and baselines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flags import is_ours, is_planned, value
from benchmarks.rows import Row, peak_gib
from benchmarks.runner.planning import PLAN_FLAG
from benchmarks.suites import losses, ranking
from benchmarks.suites.table import name
from benchmarks.table import ABSENT, Table, cell_gib, cell_ms, cell_number, cell_ratio, cell_signed_share


@dataclass(frozen=True)
class Point:
    row: Row
    none: Row | None  # The unswapped run of its case
    baseline: Row | None  # The fastest baseline that fits the budget

    @property
    def peak_error(self) -> float | None:
        return _error(self.row["predicted_peak_gib"], peak_gib(self.row))

    @property
    def step_error(self) -> float | None:
        return _error(self.row["predicted_step_ms"], self.row["step_ms_median"])

    @property
    def above_bound(self) -> float | None:
        """Return measured step time ÷ what no plan is below in the planner's model, minus 1; ``None``: not known."""
        return _error(self.row["step_ms_median"], self.row.get("lower_bound_ms"))

    @property
    def is_within(self) -> bool | None:
        measured = peak_gib(self.row)
        return None if measured is None else measured <= self.row["budget_gib"]

    @property
    def plan(self) -> str:
        path = value(self.row, PLAN_FLAG)
        return f"`{Path(path).name}`" if path else "found in the run"

    def times_none(self, row: Row | None) -> float | None:
        known = self.none is not None and row is not None
        return float(row["step_ms_median"] / self.none["step_ms_median"]) if known else None  # type: ignore[index]


def points(rows: Sequence[Row]) -> list[Point]:
    """Return the successful planned runs of one case, from the largest budget to the smallest."""
    planned = [row for row in rows if row["outcome"] == "ok" and row["budget_gib"] is not None]
    none = next((row for row in ranking.points(rows) if row["method"] == "none"), None)
    saving = [row for row in losses.comparable(rows) if row["method"] not in ("none", losses.REPEAT)]
    baselines = [row for row in saving if not is_ours(row)]
    ordered = sorted(planned, key=lambda row: (-row["budget_gib"], row["method"]))
    return [Point(row, none, ranking.fastest_within(baselines, row["budget_gib"])) for row in ordered]


def failed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if is_planned(row) and row["outcome"] != "ok"]


def points_table(found: Sequence[Point], rows: Sequence[Row]) -> Table:
    noise = losses.loss_noise(rows)
    within = {None: ABSENT, True: "yes", False: "**no**"}
    bounds: dict[str, Callable[[Point], object]] = {
        "no plan below, ms": lambda point: cell_ms(point.row.get("lower_bound_ms")),
        "measured above it": lambda point: cell_signed_share(point.above_bound),
    }
    table = Table.of(found, {
        "our point": lambda point: name(point.row),
        "plan": lambda point: point.plan,
        "budget GiB": lambda point: cell_gib(point.row["budget_gib"]),
        "peak GiB: predicted": lambda point: cell_gib(point.row["predicted_peak_gib"]),
        "measured": lambda point: cell_gib(peak_gib(point.row)),
        "error": lambda point: cell_signed_share(point.peak_error),
        "within budget": lambda point: within[point.is_within],
        "step ms: predicted": lambda point: cell_ms(point.row["predicted_step_ms"]),
        "measured ": lambda point: cell_ms(point.row["step_ms_median"]),
        "error ": lambda point: cell_signed_share(point.step_error),
        **(bounds if any(point.above_bound is not None for point in found) else {}),
        "× none": lambda point: cell_ratio(point.times_none(point.row)),
        "best baseline within the budget":
            lambda point: "no baseline fits" if point.baseline is None else point.baseline["method"],
        "its × none": lambda point: cell_ratio(point.times_none(point.baseline)),
        "re-plans": lambda point: cell_number(point.row["num_replans"]),
        "losses": lambda point: losses.cell(point.row, noise),
    })  # fmt: skip
    return Table([title.strip() for title in table.head], table.rows)


def largest(errors: Sequence[float | None]) -> float | None:
    return max((abs(error) for error in errors if error is not None), default=None)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1.0
