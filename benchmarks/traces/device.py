"""The compute on the device, by launch order and by time, for checks and figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.traces import intervals
from benchmarks.traces.engine import Engine, Wait
from benchmarks.traces.records import NO_LAUNCH, US, Range, Trace, Work

CLOSED_GAP_NS = 10 * US
"""Shorter gaps between kernels come from launching and count as busy."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A stretch of device time."""

    start_ns: int
    end_ns: int


class Compute:
    """The work on streams without swap copies. The main stream is the one that is busy longest.

    In the emulation the host computes. There is one stream; waits are subtracted from its busy time, since an operator
    may contain one. "Launched before" a moment means "ended before" it, since an operator that spans the moment has
    not ended.
    """

    def __init__(self, trace: Trace, engine: Engine) -> None:
        streams = [stream for found in engine.streams().values() for stream in found]
        work = trace.work
        length = work.end_ns - work.start_ns
        used = np.unique(work.stream[work.is_outer])
        self.main_stream = int(max(used, key=lambda stream: length[work.stream == stream].sum(), default=-1))
        self.shares_copy_stream = self.main_stream in streams
        """Whether swap copies run on the compute stream, which is a fault."""
        self.all = work.where(~np.isin(work.stream, streams) | (work.stream == self.main_stream))
        self.main = self.all.where(self.all.stream == self.main_stream)
        self.num_streams = len(np.unique(self.all.stream))
        self._busy_raw = _busy(self.main, engine.waits if trace.is_emulated else [])
        covering = self.all.where(~self.all.is_comm)
        raw = _busy(covering, engine.waits if trace.is_emulated else [])
        self.busy = intervals.union(raw[:, 0], raw[:, 1], CLOSED_GAP_NS)
        """Intervals in which any compute stream is busy; communication is not counted: it spins while it waits."""
        self._order(self.main.where(self.main.launch_start_ns != NO_LAUNCH))

    def _order(self, known: Work) -> None:
        self.num_ordered = len(known)
        by_end = np.argsort(known.launch_end_ns, kind="stable")
        self._launch_ends = known.launch_end_ns[by_end]
        self._latest_end = np.maximum.accumulate(known.end_ns[by_end])
        by_start = np.argsort(known.launch_start_ns, kind="stable")
        self._launched = known.where(by_start)
        self._earliest_start = np.minimum.accumulate(self._launched.start_ns[::-1])[::-1]

    def end_before(self, moment_ns: int) -> int | None:
        """Return the device's end time of the main-stream work launched before host time ``moment_ns``."""
        found = int(np.searchsorted(self._launch_ends, moment_ns, side="right"))
        return int(self._latest_end[found - 1]) if found else None

    def start_after(self, moment_ns: int) -> int | None:
        """Return the device's start time of the first main-stream work launched after ``moment_ns``."""
        found = int(np.searchsorted(self._launched.launch_start_ns, moment_ns, side="left"))
        return int(self._earliest_start[found]) if found < self.num_ordered else None

    def extent(self, at: Range) -> Extent | None:
        """Return the device time of the main-stream work launched within ``at`` on its thread."""
        work = self._launched
        first, last = np.searchsorted(work.launch_start_ns, (at.start_ns, at.end_ns), side="left")
        mine = work.thread[first:last] == at.thread
        if not mine.any():
            return None
        return Extent(int(work.start_ns[first:last][mine].min()), int(work.end_ns[first:last][mine].max()))

    def window(self, start_ns: int, end_ns: int) -> Extent | None:
        """Return the device time of all compute launched between two host times."""
        work = self.all
        launched = (work.launch_start_ns >= start_ns) & (work.launch_start_ns <= end_ns)
        if not launched.any():
            return None
        return Extent(int(work.start_ns[launched].min()), int(work.end_ns[launched].max()))

    def gaps(self, window: Extent) -> np.ndarray:
        """Return where the main stream idles, as intervals of shape (n, 2), without gaps below ``CLOSED_GAP_NS``."""
        raw = self._busy_raw
        busy = intervals.clip(intervals.union(raw[:, 0], raw[:, 1], CLOSED_GAP_NS), window.start_ns, window.end_ns)
        return intervals.subtract(np.array([[window.start_ns, window.end_ns]]), busy)

    def launch_of(self, start_ns: int) -> tuple[int, int] | None:
        """Return launch time and thread of the first main-stream work that starts at ``start_ns`` or later."""
        found = int(np.searchsorted(self.main.start_ns, start_ns, side="left"))
        if found == len(self.main) or self.main.launch_start_ns[found] == NO_LAUNCH:
            return None
        return int(self.main.launch_start_ns[found]), int(self.main.thread[found])


def _busy(work: Work, waits: Iterable[Wait]) -> np.ndarray:
    outer = work.where(work.is_outer)
    busy = intervals.union(outer.start_ns, outer.end_ns)
    waiting = np.array([(wait.at.start_ns, wait.at.end_ns) for wait in waits], np.int64).reshape(-1, 2)
    if len(waiting) == 0:
        return busy
    return intervals.subtract(busy, intervals.union(waiting[:, 0], waiting[:, 1]))
