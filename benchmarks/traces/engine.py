"""The swap engine's work, from its ranges in a trace, and the copies that each range launched.

The names of the ranges are a contract with ``megatron.swap.common.instrumentation.Ranges``;
docs/dev/architecture.md lists them.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.traces.records import MS, NO_LAUNCH, Memcpy, Range, Trace, TraceError

STEP = re.compile(r"step (\d+)")
LAYER = re.compile(r"(forward|backward) layers\.(\d+) mb(\d+)")
GROUP = re.compile(r"(swap_out|prefetch|swap_in) (layers\.\d+ mb\d+) .+")
COPY = re.compile(r"copy_(out|in) (layers\.(\d+)/\S+) mb(\d+) (\d+)")
WAIT = re.compile(r"(release|wait) (layers\.(\d+)/\S+) mb(\d+)")
MEMORY = re.compile(r"memory (\d+)")
LARGE_BYTES = 1 << 20
"""A copy of at least this size on a copy stream must belong to the engine; otherwise it is a fault."""
DIRECTION_OF = {"DtoH": "out", "HtoD": "in"}


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    start_ns: int
    end_ns: int

    def has(self, moment_ns: int) -> bool:
        return self.start_ns <= moment_ns <= self.end_ns


@dataclass(frozen=True, slots=True)
class LayerRun:
    what: str
    layer: int
    micro_batch: int
    at: Range


@dataclass(frozen=True, slots=True)
class Wait:
    """The host makes compute wait for a copy out (``release``) or for a copy in (``wait``)."""

    what: str
    site: str
    layer: int
    micro_batch: int
    at: Range


@dataclass
class StorageCopy:
    direction: str
    site: str
    layer: int
    micro_batch: int
    num_bytes: int
    at: Range
    ordered_ns: int = NO_LAUNCH  # Start of its group's range: the copy waits for the work launched before
    why: str = ""  # `swap_out`, `prefetch` or `swap_in`; empty: the copy lies in no such range
    pieces: list[Memcpy] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"copy_{self.direction} {self.site} mb{self.micro_batch}"

    @property
    def group(self) -> str:
        return f"layers.{self.layer} mb{self.micro_batch}"

    @property
    def start_ns(self) -> int:
        return min(piece.start_ns for piece in self.pieces)

    @property
    def end_ns(self) -> int:
        return max(piece.end_ns for piece in self.pieces)


@dataclass
class Engine:
    steps: list[Step] = field(default_factory=list)
    layers: list[LayerRun] = field(default_factory=list)
    copies: list[StorageCopy] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)  # Samples of (host time, bytes allocated)
    other_copies: list[Memcpy] = field(default_factory=list)  # Copies between host and device that belong to no range
    problems: list[str] = field(default_factory=list)  # Inconsistencies within the trace itself

    def step_at(self, moment_ns: int) -> Step | None:
        return _holding(self.steps, moment_ns)

    def launched_in(self, step: Step, direction: str = "") -> list[StorageCopy]:
        return [copy for copy in self.copies if step.has(copy.at.start_ns) and direction in ("", copy.direction)]

    def streams(self) -> dict[str, list[int]]:
        found: dict[str, set[int]] = {"out": set(), "in": set()}
        for copy in self.copies:
            found[copy.direction].update(piece.stream for piece in copy.pieces)
        return {direction: sorted(streams) for direction, streams in found.items()}


def read_engine(trace: Trace) -> Engine:
    engine = Engine()
    groups: dict[int, list[Range]] = defaultdict(list)
    for found in trace.ranges:
        _sort_in(engine, groups, found)
    if not engine.steps:
        raise TraceError(
            "no range 'step N' in the trace: it was not made by --swap-profile, or it ends before the first traced "
            "step did. tools/profile.sh traces whole steps."
        )
    if not any(copy.direction == "out" for copy in engine.copies):
        raise TraceError(
            "no range 'copy_out …' in the trace: nothing was swapped in these steps. Choose layers with --swap-layers; "
            "the table at the start of training says which of them stay."
        )
    for copy in engine.copies:
        group = _holding(groups[copy.at.thread], copy.at.start_ns)
        if group is None:
            engine.problems.append(f"{copy.name} lies in no group's range")
        else:
            copy.ordered_ns, copy.why = group.start_ns, group.name.split()[0]
    _assign_copies(engine, trace.copies)
    return engine


def _sort_in(engine: Engine, groups: dict[int, list[Range]], at: Range) -> None:
    if match := COPY.fullmatch(at.name):
        engine.copies.append(StorageCopy(match[1], match[2], int(match[3]), int(match[4]), int(match[5]), at))
    elif match := WAIT.fullmatch(at.name):
        engine.waits.append(Wait(match[1], match[2], int(match[3]), int(match[4]), at))
    elif match := LAYER.fullmatch(at.name):
        engine.layers.append(LayerRun(match[1], int(match[2]), int(match[3]), at))
    elif GROUP.fullmatch(at.name):
        groups[at.thread].append(at)
    elif match := STEP.fullmatch(at.name):
        engine.steps.append(Step(int(match[1]), at.start_ns, at.end_ns))
    elif match := MEMORY.fullmatch(at.name):
        engine.memory.append((at.start_ns, int(match[1])))


def _holding[Span: (Range, Step)](spans: Sequence[Span], moment_ns: int) -> Span | None:
    """Return the one of ``spans`` that contains ``moment_ns``; they are disjoint and sorted."""
    found = bisect_right(spans, moment_ns, key=lambda span: span.start_ns) - 1
    return spans[found] if found >= 0 and moment_ns <= spans[found].end_ns else None


def _assign_copies(engine: Engine, copies: Sequence[Memcpy]) -> None:
    by_thread: dict[int, list[StorageCopy]] = defaultdict(list)
    for storage in engine.copies:
        by_thread[storage.at.thread].append(storage)
    for memcpy in copies:
        candidates = by_thread.get(memcpy.thread, [])
        found = bisect_right(candidates, memcpy.launch_ns, key=lambda storage: storage.at.start_ns) - 1
        if found >= 0 and memcpy.launch_ns <= candidates[found].at.end_ns:
            candidates[found].pieces.append(memcpy)
        else:
            engine.other_copies.append(memcpy)
    streams = {stream for found in engine.streams().values() for stream in found}
    first_ns = engine.steps[0].start_ns
    for memcpy in engine.other_copies:
        is_ours = memcpy.stream in streams and memcpy.direction in DIRECTION_OF and memcpy.num_bytes >= LARGE_BYTES
        # A copy that was under way when the capture began has no launch in the trace.
        if is_ours and (memcpy.launch_ns != NO_LAUNCH or memcpy.start_ns >= first_ns):
            engine.problems.append(
                f"a {memcpy.direction} copy of {memcpy.num_bytes} bytes on copy stream {memcpy.stream}, "
                f"{(memcpy.start_ns - first_ns) / MS:.3f} ms after the first step began, belongs to no range"
            )
    for storage in engine.copies:
        moved = sum(piece.num_bytes for piece in storage.pieces)
        wrong = {piece.direction for piece in storage.pieces if DIRECTION_OF.get(piece.direction) != storage.direction}
        if moved != storage.num_bytes:
            said = f"announced {storage.num_bytes} bytes, its copies moved {moved}"
            engine.problems.append(f"{storage.name}: {said}")
        if wrong:
            engine.problems.append(f"{storage.name}: copied {', '.join(sorted(wrong))}")
    # A storage without copies has no times: it was reported above and is dropped here.
    engine.copies = [storage for storage in engine.copies if storage.pieces]
