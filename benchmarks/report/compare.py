"""Our points beside the baselines of the same case: which is faster with no more memory, and why by the data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.report.flags import is_ours
from benchmarks.report.overhead import Rung, rung
from benchmarks.rows import Row, peak_gib
from benchmarks.suites.frontier import frontier
from benchmarks.suites.losses import REPEAT, comparable

PEAK = "peak"
"""The peak that counts for the row, whichever field that is."""
RESERVED = "device_reserved_gib"
PEAK_DIGITS = 2
"""Peaks are the same when they print the same."""
LEAST_RATIO = 1.01
"""A smaller ratio counts as no difference."""
SAME_GIB = {PEAK: 0.0, RESERVED: 0.2}
"""A baseline that needs at most so much more counts as needing the same: allocators reserve in pieces."""


class Faster(Enum):
    OURS = "ours"
    PEER = "peer"
    NEITHER = "neither"
    """The middle halves of their step times overlap, or the medians are nearer than ``LEAST_RATIO``."""


@dataclass(frozen=True)
class Duel:
    """One of our points and the best that others do at its peak or below."""

    ours: Row
    peer: Row | None
    """`None`: no measured baseline fits."""
    faster: Faster | None
    ratio: float | None
    """The slower step over the faster one, at least one."""


@dataclass(frozen=True)
class Loss:
    """A peer that is clearly faster than everything of ours with no more memory."""

    peer: Row
    ours: Row | None
    """Our fastest point at the peer's peak or below; ``None``: none of ours fits there."""
    ratio: float | None
    rung: Rung | None
    """The arithmetic of our point, where the rows allow it."""
    lowest: Row | None
    """Our point with the lowest peak."""


def cases(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows by case, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def points(rows: Sequence[Row], memory: str = PEAK) -> list[Row]:
    """Runs that worked and have a peak: what can be compared. ``memory``: ``PEAK``, or the field that is the peak."""
    return [row for row in rows if row["outcome"] == "ok" and gib(row, memory) is not None]


def gib(row: Row, memory: str = PEAK) -> float | None:
    """What was measured of ``memory``."""
    return peak_gib(row) if memory == PEAK else row[memory]


def peak(row: Row, memory: str = PEAK) -> float:
    """Of a row that has one: as printed, in GiB."""
    found = gib(row, memory)
    assert found is not None
    return round(found, PEAK_DIGITS)


def by_peak(rows: Sequence[Row], memory: str = PEAK) -> list[Row]:
    """From the lowest peak to the highest; then those without a peak; then what failed."""
    measured = sorted(points(rows, memory), key=lambda row: (peak(row, memory), row["step_ms_median"], row["method"]))
    rest = [row for row in rows if row not in measured]
    return [*measured, *sorted(rest, key=lambda row: row["outcome"] != "ok")]


def on_frontier(rows: Sequence[Row]) -> list[Row]:
    """Those of one case that no other equals or beats in both peak and step time, by rising peak."""
    return _frontier(comparable(rows))


def _frontier(rows: Sequence[Row]) -> list[Row]:
    found = points(rows)
    return [found[index] for index in frontier([(peak(row), row["step_ms_median"]) for row in found])]


def fastest_within(rows: Sequence[Row], peak_gib: float, memory: str = PEAK) -> Row | None:
    """The fastest at this peak or below; of equally fast ones that with the lower peak, then the earlier name."""
    fits = [row for row in points(rows, memory) if peak(row, memory) <= round(peak_gib + SAME_GIB[memory], PEAK_DIGITS)]
    return min(fits, key=lambda row: (row["step_ms_median"], peak(row, memory), row["method"]), default=None)


def middle_half(row: Row) -> tuple[float, float]:
    """First and third quartile of the step times."""
    times = row["step_ms_all"]
    if len(times) < 2:
        return row["step_ms_median"], row["step_ms_median"]
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return first, third


def faster(ours: Row, peer: Row) -> Faster:
    """Whose steps are faster, beyond doubt."""
    mine, theirs = middle_half(ours), middle_half(peer)
    if ratio(ours, peer) < LEAST_RATIO:
        return Faster.NEITHER
    if mine[1] < theirs[0]:
        return Faster.OURS
    return Faster.PEER if theirs[1] < mine[0] else Faster.NEITHER


def ratio(one: Row, other: Row) -> float:
    """The slower step over the faster one."""
    times = one["step_ms_median"], other["step_ms_median"]
    return float(max(times) / min(times))


def duels(rows: Sequence[Row], memory: str = PEAK) -> list[Duel]:
    """Each of our points of one case, from the lowest peak to the highest."""
    rows = comparable(rows)
    peers = [row for row in rows if not is_ours(row)]
    found = []
    for ours in by_peak([row for row in points(rows, memory) if is_ours(row)], memory):
        peer = fastest_within(peers, peak(ours, memory), memory)
        if peer is None:
            found.append(Duel(ours, None, None, None))
        else:
            found.append(Duel(ours, peer, faster(ours, peer), ratio(ours, peer)))
    return found


def losses(rows: Sequence[Row]) -> list[Loss]:
    """Where a peer is better: those on the peers' own frontier that beat all of ours at their peak or below.

    ``none`` is no way of saving memory: what ours cost beside it is told for each of them.
    """
    rows = comparable(rows)
    mine = [row for row in points(rows) if is_ours(row)]
    lowest = min(mine, key=peak, default=None)
    found = []
    for peer in _frontier([row for row in rows if not is_ours(row) and row["method"] not in ("none", REPEAT)]):
        ours = fastest_within(mine, peak(peer))
        if ours is None:
            found.append(Loss(peer, None, None, None, lowest))
        elif faster(ours, peer) is Faster.PEER:
            found.append(Loss(peer, ours, ratio(ours, peer), rung(ours, rows), lowest))
    return found


@dataclass(frozen=True)
class Repeats:
    """What one case says of the noise between runs of one method."""

    names: list[str]
    """Methods that ran more than once; a repeat of ``none`` counts for it."""
    largest_share: float
    """By how much the slowest run's median step is longer than the fastest one's, where they differ most."""


def repeats(rows: Sequence[Row]) -> Repeats | None:
    """``None``: every method ran once."""
    runs = {row["method"]: list(row.get("step_ms_rounds") or ()) for row in points(rows)}
    again = runs.pop(REPEAT, [])
    if "none" in runs:
        runs["none"] += again
    ratios = {name: max(medians) / min(medians) for name, medians in runs.items() if len(medians) > 1}
    return Repeats(list(ratios), max(ratios.values()) - 1.0) if ratios else None
