"""Our points against the baselines of the same case: which is faster with no more memory."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.flags import is_ours
from benchmarks.rows import Row
from benchmarks.suites.losses import REPEAT, comparable
from benchmarks.suites.ranking import by_peak, fastest_within, on_frontier, peak, points

LEAST_RATIO = 1.01  # A smaller ratio of step times counts as no difference


class Faster(Enum):
    OURS = "ours"
    BASELINE = "baseline"
    NEITHER = "neither"  # The middle halves of the step times overlap, or the medians differ by less than `LEAST_RATIO`


@dataclass(frozen=True)
class Duel:
    ours: Row
    baseline: Row | None = None  # `None`: no measured baseline fits
    faster: Faster | None = None
    ratio: float | None = None  # The slower step time ÷ the faster one


@dataclass(frozen=True)
class Loss:
    """A baseline that is clearly faster than all of our points that need no more memory."""

    baseline: Row
    ours: Row | None = None  # Our fastest point at the baseline's peak or below; `None`: none of our points fits there
    ratio: float = 1.0


def middle_half(row: Row) -> tuple[float, float]:
    """Return the first and third quartile of the step times, in ms."""
    times = row["step_ms_all"]
    if len(times) < 2:
        return row["step_ms_median"], row["step_ms_median"]
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, third


def faster(ours: Row, baseline: Row) -> Faster:
    mine, theirs = middle_half(ours), middle_half(baseline)
    if ratio(ours, baseline) < LEAST_RATIO:
        return Faster.NEITHER
    if mine[1] < theirs[0]:
        return Faster.OURS
    return Faster.BASELINE if theirs[1] < mine[0] else Faster.NEITHER


def ratio(one: Row, other: Row) -> float:
    times = one["step_ms_median"], other["step_ms_median"]
    return float(max(times) / min(times))


def duels(rows: Sequence[Row]) -> list[Duel]:
    rows = comparable(rows)
    baselines = [row for row in rows if not is_ours(row)]
    found = []
    for ours in by_peak([row for row in points(rows) if is_ours(row)]):
        baseline = fastest_within(baselines, peak(ours))
        told = () if baseline is None else (baseline, faster(ours, baseline), ratio(ours, baseline))
        found.append(Duel(ours, *told))
    return found


def losses(rows: Sequence[Row]) -> list[Loss]:
    """Return the baselines on the baselines' own frontier that beat all our points at their peak or below."""
    rows = comparable(rows)
    mine = [row for row in points(rows) if is_ours(row)]
    others = [row for row in rows if not is_ours(row) and row["method"] not in ("none", REPEAT)]
    found = []
    for baseline in on_frontier(others):
        ours = fastest_within(mine, peak(baseline))
        if ours is None:
            found.append(Loss(baseline))
        elif faster(ours, baseline) is Faster.BASELINE:
            found.append(Loss(baseline, ours, ratio(ours, baseline)))
    return found
