"""Write a small Chrome trace of the engine's work in device time, for https://ui.perfetto.dev."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.traces.analysis import Analysis
from benchmarks.traces.engine import Step

COMPUTE, OUT, IN, HOST = range(1, 5)
LANES = {COMPUTE: "compute", OUT: "copies out (D2H)", IN: "copies in (H2D)", HOST: "engine (host)"}
PROCESS = 1
Event = dict[str, Any]


def write_perfetto(analysis: Analysis, path: Path) -> None:
    events: list[Event] = [_named("process_name", name="Megatron Swap")]
    for lane, name in LANES.items():
        events += [_named("thread_name", lane, name=name), _named("thread_sort_index", lane, sort_index=lane)]
    for step in analysis.engine.steps:
        events += _step_events(analysis, step)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _step_events(analysis: Analysis, step: Step) -> Iterator[Event]:
    engine, compute = analysis.engine, analysis.compute
    yield _slice(HOST, f"step {step.number}", step.start_ns, step.end_ns)
    for run in engine.layers:
        extent = compute.extent(run.at) if step.has(run.at.start_ns) else None
        if extent is not None:
            group = f"layers.{run.layer} mb{run.micro_batch}"
            yield _slice(COMPUTE, f"{run.what} {group}", extent.start_ns, extent.end_ns, group=group)
    for stall in analysis.stalls:
        if step.has(stall.start_ns):
            yield _slice(COMPUTE, f"STALL {stall.name}", stall.start_ns, stall.end_ns, site=stall.site)
    for copy in engine.launched_in(step):
        about = {"group": copy.group, "site": copy.site, "why": copy.why}
        lane = OUT if copy.direction == "out" else IN
        for piece in copy.pieces:
            figures = {"bytes": piece.num_bytes, "GB/s": round(piece.gb_per_s, 2)}
            yield _slice(lane, copy.group, piece.start_ns, piece.end_ns, **about, **figures)
        yield _slice(HOST, f"copy_{copy.direction} {copy.group}", copy.at.start_ns, copy.at.end_ns, **about)
    for moment, num_bytes in engine.memory:
        # A mark stands where the first kernel launched after it starts.
        start_ns = compute.start_after(moment) if step.has(moment) else None
        if start_ns is not None:
            counter = {"ts": start_ns / 1e3, "args": {"bytes": num_bytes}}
            yield {"ph": "C", "name": "memory in use", "pid": PROCESS, **counter}


def _named(what: str, lane: int | None = None, **args: object) -> Event:
    thread = {} if lane is None else {"tid": lane}
    return {"ph": "M", "name": what, "pid": PROCESS, **thread, "args": args}


def _slice(lane: int, name: str, start_ns: int, end_ns: int, **args: object) -> Event:
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"ph": "X", "name": name, "pid": PROCESS, "tid": lane, **times, "args": args}
