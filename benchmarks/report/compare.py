"""Our points against the baselines of the same case: which is faster with no more memory, and why."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.flags import is_ours
from benchmarks.report.overhead import Rung, rung
from benchmarks.rows import Row, peak_gib
from benchmarks.suites.frontier import frontier
from benchmarks.suites.losses import REPEAT, comparable

PEAK = "peak"
"""Compare by the peak that counts for the row, whichever field holds it."""
RESERVED = "device_reserved_gib"
PEAK_DIGITS = 2
"""Peaks are equal when they print the same with this many digits."""
LEAST_RATIO = 1.01
"""A smaller ratio of step times counts as no difference."""
SAME_GIB = {PEAK: 0.0, RESERVED: 0.2}
"""A baseline that needs at most this many GiB more counts as equal, because allocators reserve in blocks."""


class Faster(Enum):
    OURS = "ours"
    BASELINE = "baseline"
    NEITHER = "neither"
    """The middle halves of the step times overlap, or the medians differ by less than ``LEAST_RATIO``."""


@dataclass(frozen=True)
class Duel:
    """One of our points and the fastest baseline at its peak or below."""

    ours: Row
    baseline: Row | None
    """`None`: no measured baseline fits."""
    faster: Faster | None
    ratio: float | None
    """The slower step time ÷ the faster one."""


@dataclass(frozen=True)
class Loss:
    """A baseline that is clearly faster than all of our points that need no more memory."""

    baseline: Row
    ours: Row | None
    """Our fastest point at the baseline's peak or below; ``None``: none of our points fits there."""
    ratio: float | None
    rung: Rung | None
    """The arithmetic of our point's copies, where the rows allow it."""
    lowest: Row | None
    """Our point with the lowest peak."""


def cases(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by case, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def points(rows: Sequence[Row], memory: str = PEAK) -> list[Row]:
    """Return the runs that can be compared: successful, with a peak. ``memory``: ``PEAK``, or the peak's field."""
    return [row for row in rows if row["outcome"] == "ok" and gib(row, memory) is not None]


def gib(row: Row, memory: str = PEAK) -> float | None:
    """Return the measured peak in GiB; ``None``: not measured."""
    return peak_gib(row) if memory == PEAK else row[memory]


def peak(row: Row, memory: str = PEAK) -> float:
    """Return the peak of a row that has one, in GiB, rounded as it is printed."""
    found = gib(row, memory)
    assert found is not None
    return round(found, PEAK_DIGITS)


def by_peak(rows: Sequence[Row], memory: str = PEAK) -> list[Row]:
    """Sort rows from the lowest peak to the highest, then those without a peak, then failed ones."""
    measured = sorted(points(rows, memory), key=lambda row: (peak(row, memory), row["step_ms_median"], row["method"]))
    rest = [row for row in rows if row not in measured]
    return [*measured, *sorted(rest, key=lambda row: row["outcome"] != "ok")]


def on_frontier(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one case that no other equals or beats in both peak and step time, by rising peak."""
    return _frontier(comparable(rows))


def _frontier(rows: Sequence[Row]) -> list[Row]:
    found = points(rows)
    return [found[index] for index in frontier([(peak(row), row["step_ms_median"]) for row in found])]


def fastest_within(rows: Sequence[Row], peak_gib: float, memory: str = PEAK) -> Row | None:
    """Return the fastest row at this peak or below; ties go to the lower peak, then to the earlier name."""
    fits = [row for row in points(rows, memory) if peak(row, memory) <= round(peak_gib + SAME_GIB[memory], PEAK_DIGITS)]
    return min(fits, key=lambda row: (row["step_ms_median"], peak(row, memory), row["method"]), default=None)


def middle_half(row: Row) -> tuple[float, float]:
    """Return the first and third quartile of the step times, in ms."""
    times = row["step_ms_all"]
    if len(times) < 2:
        return row["step_ms_median"], row["step_ms_median"]
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, third


def faster(ours: Row, baseline: Row) -> Faster:
    """Return which of the two has clearly faster steps."""
    mine, theirs = middle_half(ours), middle_half(baseline)
    if ratio(ours, baseline) < LEAST_RATIO:
        return Faster.NEITHER
    if mine[1] < theirs[0]:
        return Faster.OURS
    return Faster.BASELINE if theirs[1] < mine[0] else Faster.NEITHER


def ratio(one: Row, other: Row) -> float:
    """Return the slower median step time ÷ the faster one."""
    times = one["step_ms_median"], other["step_ms_median"]
    return float(max(times) / min(times))


def duels(rows: Sequence[Row], memory: str = PEAK) -> list[Duel]:
    """Return a duel for each of our points of one case, from the lowest peak to the highest."""
    rows = comparable(rows)
    baselines = [row for row in rows if not is_ours(row)]
    found = []
    for ours in by_peak([row for row in points(rows, memory) if is_ours(row)], memory):
        baseline = fastest_within(baselines, peak(ours, memory), memory)
        if baseline is None:
            found.append(Duel(ours, None, None, None))
        else:
            found.append(Duel(ours, baseline, faster(ours, baseline), ratio(ours, baseline)))
    return found


def losses(rows: Sequence[Row]) -> list[Loss]:
    """Return the baselines on the baselines' own frontier that beat all our points at their peak or below.

    ``none`` and its repeat are left out: they save no memory, and the tables compare each point with ``none`` anyway.
    """
    rows = comparable(rows)
    if not any(map(is_ours, rows)):
        return []  # the case compares Megatron with itself
    mine = [row for row in points(rows) if is_ours(row)]
    lowest = min(mine, key=peak, default=None)
    found = []
    for baseline in _frontier([row for row in rows if not is_ours(row) and row["method"] not in ("none", REPEAT)]):
        ours = fastest_within(mine, peak(baseline))
        if ours is None:
            found.append(Loss(baseline, None, None, None, lowest))
        elif faster(ours, baseline) is Faster.BASELINE:
            found.append(Loss(baseline, ours, ratio(ours, baseline), rung(ours, rows), lowest))
    return found


@dataclass(frozen=True)
class Repeats:
    """How much repeated runs of one method differ, in one case."""

    names: list[str]
    """Methods that ran more than once; ``none-again`` counts as a run of ``none``."""
    largest_share: float
    """How much longer the slowest run's median step is than the fastest one's: the largest of all methods."""


def repeats(rows: Sequence[Row]) -> Repeats | None:
    """Return the differences between repeated runs; ``None``: every method ran once."""
    runs = {row["method"]: list(row.get("step_ms_rounds") or ()) for row in points(rows)}
    again = runs.pop(REPEAT, [])
    if "none" in runs:
        runs["none"] += again
    ratios = {name: max(medians) / min(medians) for name, medians in runs.items() if len(medians) > 1}
    return Repeats(list(ratios), max(ratios.values()) - 1.0) if ratios else None
