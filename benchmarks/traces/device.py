"""The compute on the device, by launch order and by time, for checks and figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.traces import intervals
from benchmarks.traces.engine import Engine, Wait
from benchmarks.traces.records import NO_LAUNCH, US, Range, Trace

CLOSED_GAP_NS = 10 * US  # Shorter gaps between kernels come from launching and count as busy


@dataclass(frozen=True, slots=True)
class Extent:
    start_ns: int
    end_ns: int

    @staticmethod
    def of(work: np.recarray) -> Extent | None:
        return Extent(int(work.start_ns.min()), int(work.end_ns.max())) if len(work) else None


class Compute:
    """The work on streams without swap copies. The main stream is the one that is busy longest.

    In the emulation the host computes. There is one stream; waits are subtracted from its busy time, since an operator
    may contain one. "Launched before" a moment means "ended before" it, since an operator that spans the moment has
    not ended.
    """

    def __init__(self, trace: Trace, engine: Engine) -> None:
        streams = [stream for found in engine.streams().values() for stream in found]
        waits = engine.waits if trace.is_emulated else []
        work = trace.work
        length = work.end_ns - work.start_ns
        used = np.unique(work.stream[work.is_outer])
        self.main_stream = int(max(used, key=lambda stream: length[work.stream == stream].sum(), default=-1))
        self.shares_copy_stream = self.main_stream in streams
        """Whether swap copies run on the compute stream, which is a fault."""
        self.all = work[~np.isin(work.stream, streams) | (work.stream == self.main_stream)]
        self.main = self.all[self.all.stream == self.main_stream]
        self.num_streams = len(np.unique(self.all.stream))
        self._busy_main = _busy(self.main, waits)
        self.busy = _busy(self.all[~self.all.is_comm], waits)
        """Intervals in which any compute stream is busy; communication is not counted: it spins while it waits."""
        known = self.main[self.main.launch_start_ns != NO_LAUNCH]
        self.num_ordered = len(known)
        by_end = known[np.argsort(known.launch_end_ns, kind="stable")]
        self._launch_ends, self._latest_end = by_end.launch_end_ns, np.maximum.accumulate(by_end.end_ns)
        self._launched = known[np.argsort(known.launch_start_ns, kind="stable")]
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
        first, last = np.searchsorted(self._launched.launch_start_ns, (at.start_ns, at.end_ns), side="left")
        within = self._launched[first:last]
        return Extent.of(within[within.thread == at.thread])

    def window(self, start_ns: int, end_ns: int) -> Extent | None:
        launch = self.all.launch_start_ns
        return Extent.of(self.all[(launch >= start_ns) & (launch <= end_ns)])

    def gaps(self, window: Extent) -> np.ndarray:
        busy = intervals.clip(self._busy_main, window.start_ns, window.end_ns)
        return intervals.subtract(np.array([[window.start_ns, window.end_ns]]), busy)

    def launch_of(self, start_ns: int) -> tuple[int, int] | None:
        found = int(np.searchsorted(self.main.start_ns, start_ns, side="left"))
        if found == len(self.main) or self.main.launch_start_ns[found] == NO_LAUNCH:
            return None
        return int(self.main.launch_start_ns[found]), int(self.main.thread[found])


def _busy(work: np.recarray, waits: Iterable[Wait]) -> np.ndarray:
    """Return the intervals in which work runs that is not in ``waits``; short gaps are closed."""
    outer = work[work.is_outer]
    busy = intervals.subtract(intervals.union(outer.start_ns, outer.end_ns), intervals.of(wait.at for wait in waits))
    return intervals.union(busy[:, 0], busy[:, 1], CLOSED_GAP_NS)
