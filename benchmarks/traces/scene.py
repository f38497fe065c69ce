"""One step in device time: compute, copies and stalls, for the picture and for Perfetto."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.traces.analysis import Analysis
from benchmarks.traces.engine import Step, StorageCopy
from benchmarks.traces.figures import Stall
from benchmarks.traces.records import MS, TraceError


@dataclass(frozen=True)
class Block:
    """A layer's forward or backward over one micro-batch, on the device."""

    what: str
    layer: int
    micro_batch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Scene:
    """Everything between the first and the last device activity of a step."""

    step: Step
    start_ns: int
    end_ns: int
    blocks: list[Block]
    copies: list[StorageCopy]
    stalls: list[Stall]
    memory: list[tuple[int, int]]
    """Device times, and the bytes allocated from then on."""

    def ms(self, moment_ns: float) -> float:
        return (moment_ns - self.start_ns) / MS

    @property
    def micro_batches(self) -> list[int]:
        return sorted({block.micro_batch for block in self.blocks})


def scene_of(analysis: Analysis, number: int | None = None) -> Scene:
    """Return the scene of step ``number``; ``None``: the last traced step.

    Raises:
        TraceError: the step was not traced, or nothing ran on the device in it.
    """
    engine, compute = analysis.engine, analysis.compute
    step = next((step for step in engine.steps if step.number == number), None)
    if number is None:
        step = engine.steps[-1]
    if step is None:
        traced = ", ".join(str(step.number) for step in engine.steps)
        raise TraceError(f"step {number} is not in the trace. Choose one of: {traced}")
    copies = [copy for copy in engine.copies if step.start_ns <= copy.at.start_ns <= step.end_ns]
    blocks = []
    for run in engine.layers:
        extent = compute.extent(run.at) if step.start_ns <= run.at.start_ns <= step.end_ns else None
        if extent is not None:
            blocks.append(Block(run.what, run.layer, run.micro_batch, extent.start_ns, extent.end_ns))
    window = compute.window(step.start_ns, step.end_ns)
    edges = [edge for copy in copies for edge in (copy.start_ns, copy.end_ns)]
    edges += [window.start_ns, window.end_ns] if window is not None else []
    if not edges:
        raise TraceError(f"step {step.number}: nothing ran on the device in it. Choose another step.")
    start_ns, end_ns = min(edges), max(edges)
    return Scene(
        step, start_ns, end_ns, blocks, copies,
        [stall for stall in analysis.stalls if start_ns <= stall.start_ns <= end_ns],
        _memory(analysis, step),
    )  # fmt: skip


def _memory(analysis: Analysis, step: Step) -> list[tuple[int, int]]:
    """Return the step's memory marks, each at the device time of the first kernel launched after it."""
    marks: Sequence[tuple[int, int]] = analysis.engine.memory
    first = bisect_left(marks, step.start_ns, key=lambda mark: mark[0])
    last = bisect_left(marks, step.end_ns, key=lambda mark: mark[0])
    placed = [(analysis.compute.start_after(moment), num_bytes) for moment, num_bytes in marks[first:last]]
    return sorted(((at, num) for at, num in placed if at is not None), key=lambda mark: mark[0])
