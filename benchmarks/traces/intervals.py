"""Sets of time: sorted, disjoint intervals as an int64 array of shape (n, 2), start and end."""

from collections.abc import Iterable
from typing import Any

import numpy as np


def of(spans: Iterable[Any]) -> np.ndarray:
    """Return the union of what has ``start_ns`` and ``end_ns``."""
    found = np.array([(span.start_ns, span.end_ns) for span in spans], np.int64).reshape(-1, 2)
    return union(found[:, 0], found[:, 1])


def union(starts: np.ndarray, ends: np.ndarray, close_below: int = 0) -> np.ndarray:
    """Return the union of the intervals; gaps shorter than ``close_below`` are closed."""
    if len(starts) == 0:
        return np.empty((0, 2), np.int64)
    by_start = np.argsort(starts, kind="stable")
    starts, latest = starts[by_start], np.maximum.accumulate(ends[by_start])
    gap = starts[1:] - latest[:-1]
    is_first = np.concatenate(([True], (gap > 0) & (gap >= close_below)))
    is_last = np.concatenate((is_first[1:], [True]))
    return np.stack((starts[is_first], latest[is_last]), axis=1)


def total(intervals: np.ndarray) -> int:
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def covered(starts: np.ndarray, ends: np.ndarray, cover: np.ndarray) -> np.ndarray:
    """Return for each interval how much of it lies in ``cover``."""
    starts, ends = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    if len(cover) == 0:
        return np.zeros(len(starts), np.int64)
    before = np.concatenate(([0], np.cumsum(cover[:, 1] - cover[:, 0])))

    def until(moments: np.ndarray) -> np.ndarray:
        last = np.searchsorted(cover[:, 0], moments, side="right") - 1
        inside = np.minimum(moments - cover[last, 0], cover[last, 1] - cover[last, 0])
        return np.where(last < 0, 0, before[last] + inside)

    return until(ends) - until(starts)


def subtract(intervals: np.ndarray, taken: np.ndarray) -> np.ndarray:
    edges = np.unique(np.concatenate((intervals.ravel(), taken.ravel())))
    starts, ends = edges[:-1], edges[1:]
    stays = (covered(starts, ends, intervals) > 0) & (covered(starts, ends, taken) == 0)
    return union(starts[stays], ends[stays])


def clip(intervals: np.ndarray, start: int, end: int) -> np.ndarray:
    inside = np.clip(intervals, start, end)
    return inside[inside[:, 1] > inside[:, 0]]
