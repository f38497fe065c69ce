"""Figures of a trace: copy time hidden under compute, use of the link, stalls and gaps of compute, prediction."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.traces import intervals
from benchmarks.traces.device import Compute, Extent
from benchmarks.traces.engine import Engine, Step, StorageCopy
from benchmarks.traces.records import MS, Range
from benchmarks.traces.storages import TracedStorage

NUM_GAPS = 10  # Number of the largest gaps that are listed

PROFILERS_OWN = "ProfilerStep"  # A range that torch.profiler adds by itself, without information here


@dataclass(frozen=True)
class Link:
    num_copies: int
    num_bytes: int
    copy_ms: float
    gb_per_s: float | None  # Bytes ÷ time in which at least one copy ran, in 10^9 bytes per second
    busy_share: float  # Fraction of the steps' time in which a copy ran
    hidden_share: float | None  # Fraction of the copy time in which compute was busy


@dataclass(frozen=True)
class Stall:
    what: str  # `wait` for a copy in; `release` for a copy out, before its memory is released
    site: str
    micro_batch: int
    start_ns: int
    end_ns: int

    @property
    def name(self) -> str:
        return f"{self.what} {self.site} mb{self.micro_batch}"

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / MS


@dataclass(frozen=True)
class Gap:
    step: int
    start_ms: float  # Time since the step's first kernel
    ms: float
    owner: str  # The wait that filled most of the gap, else `host: …` with the range that launched the next kernel
    stalled_ms: float  # Time in the gap in which compute waited for copies


def copy_spans(copies: Sequence[StorageCopy]) -> np.ndarray:
    return intervals.of(piece for copy in copies for piece in copy.pieces)


def hidden_share(spans: np.ndarray, busy: np.ndarray) -> float | None:
    length = intervals.total(spans)
    return float(intervals.covered(spans[:, 0], spans[:, 1], busy).sum()) / length if length else None


def link(within: Sequence[StorageCopy], direction: str, compute: Compute, steps_ns: int) -> Link:
    copies = [copy for copy in within if copy.direction == direction]
    spans = copy_spans(copies)
    copy_ns = intervals.total(spans)
    num_bytes = sum(piece.num_bytes for copy in copies for piece in copy.pieces)
    return Link(
        num_copies=sum(len(copy.pieces) for copy in copies),
        num_bytes=num_bytes,
        copy_ms=copy_ns / MS,
        gb_per_s=num_bytes / copy_ns if copy_ns else None,
        busy_share=copy_ns / steps_ns,
        hidden_share=hidden_share(spans, compute.busy),
    )


def find_stalls(storages: Sequence[TracedStorage], compute: Compute) -> list[Stall]:
    """Find where compute waited for a copy.

    The main stream idles from the end of the last kernel launched before the wait to the start of the first kernel
    launched after it. The stall is the part of this idle time after the host enqueued the wait and before the copy
    ended: before that the host was late, after that nothing blocked compute. Stalls of several waits may overlap.
    """
    waits = [(wait, storage.out) for storage in storages for wait in (storage.release, storage.overtaken)]
    waits += [(back.wait, back.copy) for storage in storages for back in storage.reloads]
    stalls = []
    for wait, copy in waits:
        next_start = None if wait is None else compute.start_after(wait.at.end_ns)
        if wait is None or next_start is None:
            continue
        start_ns = max(wait.at.start_ns, compute.end_before(wait.at.start_ns) or wait.at.start_ns)
        end_ns = min(copy.end_ns, next_start)
        if end_ns > start_ns:
            stalls.append(Stall(wait.what, wait.site, wait.micro_batch, start_ns, end_ns))
    return sorted(stalls, key=lambda stall: stall.start_ns)


def stalled_ms(stalls: Sequence[Stall]) -> float:
    return intervals.total(intervals.of(stalls)) / MS


def find_gaps(steps: Sequence[Step], compute: Compute, stalls: Sequence[Stall], ranges: Sequence[Range]) -> list[Gap]:
    rows = []
    for step in steps:
        window = compute.window(step.start_ns, step.end_ns)
        if window is not None:
            rows += [(end - start, int(start), int(end), step, window) for start, end in compute.gaps(window)]
    rows.sort(key=lambda row: -row[0])
    return [_gap(start, end, step, window, compute, stalls, ranges) for _, start, end, step, window in rows[:NUM_GAPS]]


def _gap(
    start_ns: int, end_ns: int, step: Step, window: Extent,
    compute: Compute, stalls: Sequence[Stall], ranges: Sequence[Range],
) -> Gap:  # fmt: skip
    inside = [s for s in stalls if s.end_ns > start_ns and s.start_ns < end_ns]
    stalled_ns = intervals.total(intervals.clip(intervals.of(inside), start_ns, end_ns))
    if 2 * stalled_ns >= end_ns - start_ns:
        owner = max(inside, key=lambda s: min(s.end_ns, end_ns) - max(s.start_ns, start_ns)).name
    else:
        owner = f"host: {_launching_range(end_ns, compute, ranges)}"
    return Gap(step.number, (start_ns - window.start_ns) / MS, (end_ns - start_ns) / MS, owner, stalled_ns / MS)


def _launching_range(start_ns: int, compute: Compute, ranges: Sequence[Range]) -> str:
    """Return the innermost range around the launch of the work that starts at ``start_ns``."""
    launch = compute.launch_of(start_ns)
    if launch is None:
        return "unknown"
    moment, thread = launch
    around = [
        at for at in ranges
        if at.thread == thread and at.start_ns <= moment <= at.end_ns and not at.name.startswith(PROFILERS_OWN)
    ]  # fmt: skip
    return min(around, key=lambda at: at.end_ns - at.start_ns).name if around else "outside all ranges"


def predict(engine: Engine, compute: Compute, direction: str) -> float | None:
    """Predict the hidden fraction of the copies in one direction: ``min(1, time × speed / bytes)``.

    *Time* is the busy time of compute that can hide a micro-batch's copies. For copies out it lies between the end of
    the first layer's forward (there is nothing to copy before) and the end of the last layer's forward. For copies in
    it lies between the start of the last layer's backward and the start of the first layer's backward (nothing is left
    to copy after). Time in which compute waited for copies does not count. *Speed* is the speed of this direction's
    copies while they ran; *bytes* are those of the micro-batch. Micro-batches are weighted by their bytes. ``None``:
    nothing was copied, or the trace has too few layers.
    """
    extents: dict[tuple[int, int], list[Extent]] = defaultdict(list)
    for run in engine.layers:
        step = engine.step_at(run.at.start_ns)
        if step is not None and run.what == ("forward" if direction == "out" else "backward"):
            extent = compute.extent(run.at)
            if extent is not None:
                extents[step.number, run.micro_batch].append(extent)
    num_bytes: dict[tuple[int, int], int] = defaultdict(int)
    busy_ns = 0
    for copy in engine.copies:
        step = engine.step_at(copy.at.start_ns)
        if step is not None and copy.direction == direction:
            num_bytes[step.number, copy.micro_batch] += copy.num_bytes
            busy_ns += sum(piece.end_ns - piece.start_ns for piece in copy.pieces)
    hidden = 0.0
    for key, moved in num_bytes.items():
        if len(extents[key]) < 2:
            return None
        edges = sorted(extent.end_ns if direction == "out" else extent.start_ns for extent in extents[key])
        under_ns = intervals.total(intervals.clip(compute.busy, edges[0], edges[-1]))
        hidden += min(moved, under_ns * sum(num_bytes.values()) / busy_ns)
    return hidden / sum(num_bytes.values()) if num_bytes else None
