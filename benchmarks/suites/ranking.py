"""Rows of one case by peak memory and step time."""

from collections.abc import Sequence

from benchmarks.rows import Row, peak_gib
from benchmarks.suites.losses import comparable

PEAK_DIGITS = 2  # Peaks are equal when they print the same with this many digits


def points(rows: Sequence[Row]) -> list[Row]:
    """Return the runs that can be compared: successful, with a peak."""
    return [row for row in rows if row["outcome"] == "ok" and peak_gib(row) is not None]


def peak(row: Row) -> float:
    return round(peak_gib(row) or 0.0, PEAK_DIGITS)


def by_peak(rows: Sequence[Row]) -> list[Row]:
    """Sort rows from the lowest peak to the highest, then those without a peak, then failed ones."""
    measured = sorted(points(rows), key=lambda row: (peak(row), row["step_ms_median"], row["method"]))
    rest = [row for row in rows if row not in measured]
    return [*measured, *sorted(rest, key=lambda row: row["outcome"] != "ok")]


def fastest_within(rows: Sequence[Row], peak_gib: float) -> Row | None:
    """Return the fastest row at this peak or below; ties go to the lower peak, then to the earlier name."""
    fits = [row for row in points(rows) if peak(row) <= round(peak_gib, PEAK_DIGITS)]
    return min(fits, key=lambda row: (row["step_ms_median"], peak(row), row["method"]), default=None)


def on_frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one case that no other equals or beats in both peak and step time, by rising peak."""
    best: list[Row] = []
    for row in sorted(points(comparable(rows)), key=lambda row: (peak(row), row["step_ms_median"])):
        if not best or row["step_ms_median"] < best[-1]["step_ms_median"]:
            best.append(row)
    return best
