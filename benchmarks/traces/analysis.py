"""Analyse one trace: checks, figures, and the findings to save."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.traces import checks, figures, intervals
from benchmarks.traces.device import CLOSED_GAP_NS, Compute
from benchmarks.traces.engine import Engine, Step, read_engine
from benchmarks.traces.records import MS, US, Trace
from benchmarks.traces.storages import TracedStorage, find_storages

SLOW_LINK = 0.75
"""A link slower than this fraction is reported. Two directions at once still reach 0.89 of the link on an H200."""


@dataclass(frozen=True)
class StepFigures:
    step: int
    duration_ms: float
    """Duration of the host's range, which ends with a wait for the device if the loss is read every step."""
    compute_busy_ms: float
    d2h_ms: float
    h2d_ms: float
    stalled_ms: float
    peak_memory_bytes: int | None
    copies: checks.StepCopies


@dataclass
class Analysis:
    trace: Trace
    engine: Engine
    compute: Compute
    storages: list[TracedStorage]
    ordering: checks.Ordering
    mismatches: list[str]
    links: dict[str, figures.Link]  # Figures of the link by direction: `out`, `in`
    hidden_share: float | None  # Hidden fraction of the copies in both directions together
    predicted: dict[str, float | None]
    stalls: list[figures.Stall]
    gaps: list[figures.Gap]
    steps: list[StepFigures]
    compared: bool  # Whether a summary was given

    @property
    def is_clean(self) -> bool:
        return not self.ordering.violations and not self.mismatches


def analyse(trace: Trace, summary: dict[str, Any] | None = None, link_gb_s: float | None = None) -> Analysis:
    """Analyse a trace. ``summary``: of the same run. ``link_gb_s``: bandwidth of the idle link."""
    engine = read_engine(trace)
    compute = Compute(trace, engine)
    storages, problems = find_storages(engine)
    mismatches = [*engine.problems, *problems]
    if compute.shares_copy_stream:
        mismatches.append(f"swap copies run on stream {compute.main_stream}, which computes: nothing can overlap")
    if summary is not None:
        mismatches += checks.compare_with_summary(engine, summary)
    within = [copy for copy in engine.copies if engine.step_at(copy.at.start_ns) is not None]
    steps_ns = sum(step.end_ns - step.start_ns for step in engine.steps)
    links = {way: figures.link(within, way, compute, steps_ns) for way in ("out", "in")}
    mismatches += [
        f"copies {way} ran at {one.gb_per_s:.1f} GB/s, the link gives {link_gb_s:g}: something holds it up"
        for way, one in links.items()
        if link_gb_s is not None and one.gb_per_s is not None and one.gb_per_s < SLOW_LINK * link_gb_s
    ]
    stalls = figures.find_stalls(storages, compute)
    # The times of both directions overlap, so they are added, not united.
    by_way = [[copy for copy in within if copy.direction == way] for way in ("out", "in")]
    spans = np.concatenate([figures.copy_spans(copies) for copies in by_way])
    return Analysis(
        trace=trace,
        engine=engine,
        compute=compute,
        storages=storages,
        ordering=checks.check_order(storages, compute),
        mismatches=mismatches,
        links=links,
        hidden_share=figures.hidden_share(spans, compute.busy),
        predicted={"out": figures.predict(engine, compute, "out"), "in": figures.predict(engine, compute, "in")},
        stalls=stalls,
        gaps=figures.find_gaps(engine.steps, compute, stalls, trace.ranges),
        steps=[_step_figures(step, engine, compute, stalls) for step in engine.steps],
        compared=summary is not None,
    )


def _step_figures(step: Step, engine: Engine, compute: Compute, stalls: Sequence[figures.Stall]) -> StepFigures:
    window = compute.window(step.start_ns, step.end_ns)
    marks = [num_bytes for moment, num_bytes in engine.memory if step.start_ns <= moment <= step.end_ns]
    inside = [stall for stall in stalls if window and window.start_ns <= stall.start_ns <= window.end_ns]
    busy = intervals.clip(compute.busy, window.start_ns, window.end_ns) if window else np.empty((0, 2), np.int64)
    return StepFigures(
        step=step.number, duration_ms=(step.end_ns - step.start_ns) / MS, compute_busy_ms=intervals.total(busy) / MS,
        d2h_ms=intervals.total(figures.copy_spans(engine.launched_in(step, "out"))) / MS,
        h2d_ms=intervals.total(figures.copy_spans(engine.launched_in(step, "in"))) / MS,
        stalled_ms=figures.stalled_ms(inside), peak_memory_bytes=max(marks, default=None),
        copies=checks.count_copies(engine, step),
    )  # fmt: skip


def findings(analysis: Analysis) -> dict[str, Any]:
    engine, ordering, storages = analysis.engine, analysis.ordering, analysis.storages
    outside = [copy for copy in engine.copies if engine.step_at(copy.at.start_ns) is None]
    return {
        "clean": analysis.is_clean,
        "format": analysis.trace.format,
        "emulated": analysis.trace.is_emulated,
        "compared_with_summary": analysis.compared,
        "mismatches": analysis.mismatches,
        "violations": [{**asdict(broken), "rule_text": checks.RULES[broken.rule]} for broken in ordering.violations],
        "checks": {
            rule: {"num_checked": ordering.num_checked[rule], "least_margin_us": ordering.least_margin_us[rule]}
            for rule in checks.RULES
        },
        "reuse_not_judged": ordering.reuse_not_judged,
        "tolerance_us": checks.TOLERANCE_NS / US,
        "streams": {
            "num_compute": analysis.compute.num_streams,
            "main": analysis.compute.main_stream,
            **{f"copies_{way}": streams for way, streams in engine.streams().items()},
        },
        "storages": {
            "num_copied_out": len(storages),
            "num_returned": sum(bool(storage.reloads) for storage in storages),
            "num_overtaken": sum(storage.is_overtaken for storage in storages),
            "num_stayed": sum(storage.stayed for storage in storages),
            "num_late": sum(back.copy.why == "swap_in" for storage in storages for back in storage.reloads),
        },
        "num_copies_outside_steps": sum(len(copy.pieces) for copy in outside),
        "foreign_copies": _foreign(engine),
        "closed_gap_us": CLOSED_GAP_NS / US,
        "hidden_share": analysis.hidden_share,
        "predicted_hidden_share": analysis.predicted,
        "link": {way: asdict(one) for way, one in analysis.links.items()},
        "stalled_ms": {
            "together": figures.stalled_ms(analysis.stalls),
            **{what: figures.stalled_ms([stall for stall in analysis.stalls if stall.what == what])
               for what in ("wait", "release")},
        },
        "gaps": [asdict(gap) for gap in analysis.gaps],
        "steps": [asdict(step) for step in analysis.steps],
    }  # fmt: skip


def _foreign(engine: Engine) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for memcpy in sorted(engine.other_copies, key=lambda memcpy: memcpy.direction):
        total = found.setdefault(memcpy.direction, {"num_copies": 0, "num_bytes": 0})
        total["num_copies"] += 1
        total["num_bytes"] += memcpy.num_bytes
    return found
