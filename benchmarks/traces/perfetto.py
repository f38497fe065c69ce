"""Write a small Chrome trace of the engine's work, for https://ui.perfetto.dev."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from benchmarks.traces.analysis import Analysis
from benchmarks.traces.scene import Scene, scene_of

COMPUTE, OUT, IN, HOST = range(1, 5)
LANES = {COMPUTE: "compute", OUT: "copies out (D2H)", IN: "copies in (H2D)", HOST: "engine (host)"}
PROCESS = 1


def write_perfetto(analysis: Analysis, path: Path) -> None:
    """Write all traced steps to ``path`` (gzipped JSON)."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": PROCESS, "args": {"name": "Megatron Swap"}},
    ]
    for lane, name in LANES.items():
        events.append({"ph": "M", "name": "thread_name", "pid": PROCESS, "tid": lane, "args": {"name": name}})
        order = {"ph": "M", "name": "thread_sort_index", "pid": PROCESS, "tid": lane, "args": {"sort_index": lane}}
        events.append(order)
    for step in analysis.engine.steps:
        events += _step_events(scene_of(analysis, step.number))
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _step_events(scene: Scene) -> list[dict[str, Any]]:
    step = scene.step
    events = [_slice(HOST, f"step {step.number}", step.start_ns, step.end_ns, {})]
    for block in scene.blocks:
        group = f"layers.{block.layer} mb{block.micro_batch}"
        events.append(_slice(COMPUTE, f"{block.what} {group}", block.start_ns, block.end_ns, {"group": group}))
    for stall in scene.stalls:
        events.append(_slice(COMPUTE, f"STALL {stall.name}", stall.start_ns, stall.end_ns, {"site": stall.site}))
    for copy in scene.copies:
        args = {"group": copy.group, "site": copy.site, "why": copy.why}
        for piece in copy.pieces:
            figures = {**args, "bytes": piece.num_bytes, "GB/s": round(piece.gb_per_s, 2)}
            lane = OUT if copy.direction == "out" else IN
            events.append(_slice(lane, copy.group, piece.start_ns, piece.end_ns, figures))
        at = copy.at
        events.append(_slice(HOST, f"copy_{copy.direction} {copy.group}", at.start_ns, at.end_ns, args))
    for moment, num_bytes in scene.memory:
        counter = {"ph": "C", "name": "memory in use", "pid": PROCESS, "ts": moment / 1e3, "args": {"bytes": num_bytes}}
        events.append(counter)
    return events


def _slice(lane: int, name: str, start_ns: int, end_ns: int, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "name": name, "pid": PROCESS, "tid": lane,
        "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3, "args": args,
    }  # fmt: skip
