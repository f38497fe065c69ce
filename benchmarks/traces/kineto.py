"""Read the Chrome-trace JSON of torch.profiler, from a GPU or from the emulation on a CPU."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.traces.records import NO_LAUNCH, Activities, Memcpy, Range, Trace, TraceError, in_order, work_from

DIRECTION = re.compile(r"\b([HDP]to[HDP])\b")
EMULATED_COPY = re.compile(r"emulated copy (\d+) (\w+) (\d+)")
EMULATED_LAUNCH = re.compile(r"emulated launch (\d+)")

Event = dict[str, Any]


def read_kineto(path: Path) -> Trace:
    found = _Events(path)
    named = found.of("user_annotation")
    if not named:
        raise TraceError(
            f"{path}: no named range (cat 'user_annotation') in it. Trace a run with --swap-profile: tools/profile.sh"
        )
    found.origin_us = min(event["ts"] for event in named)
    ranges = in_order([Range(event["name"], *found.span(event), event["tid"]) for event in named])
    is_emulated = any(EMULATED_LAUNCH.fullmatch(found.name) for found in ranges)
    return _emulated(found, ranges) if is_emulated and not found.of("kernel") else _on_gpu(found, ranges)


class _Events:
    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        try:
            if content[:2] == b"\x1f\x8b":
                content = gzip.decompress(content)
            events = json.loads(content)["traceEvents"]
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path}: not a whole trace of torch.profiler ('traceEvents' in JSON): {error}") from error
        self.origin_us = 0.0
        self._by_category: dict[str, list[Event]] = {}
        for event in events:
            if event.get("ph") == "X":
                self._by_category.setdefault(event.get("cat", ""), []).append(event)

    def of(self, *categories: str) -> list[Event]:
        return [event for category in categories for event in self._by_category.get(category, [])]

    def span(self, event: Event) -> tuple[int, int]:
        """Return start and end in ns. The duration is rounded separately: adding in µs would lose digits."""
        start_ns = round((event["ts"] - self.origin_us) * 1e3)
        return start_ns, start_ns + round(event.get("dur", 0) * 1e3)


def _on_gpu(found: _Events, ranges: list[Range]) -> Trace:
    launches: dict[int, tuple[int, int, int]] = {}
    for event in found.of("cuda_runtime", "cuda_driver"):
        number = event.get("args", {}).get("correlation")
        if number:
            launch = (*found.span(event), event["tid"])
            launches[number] = min(launches.get(number, launch), launch)  # of nested calls, the outermost
    activities = Activities(launches)
    for event in found.of("kernel", "gpu_memset", "gpu_memcpy"):
        args, span = event["args"], found.span(event)
        if event["cat"] == "gpu_memcpy":
            match = DIRECTION.search(event["name"])
            direction = match[1] if match else event["name"]
            activities.add_copy(direction, args["bytes"], span, args["stream"], args.get("correlation"))
        else:
            activities.add_work(span, args["stream"], args.get("correlation"), event["name"].startswith("nccl"))
    return Trace("kineto", False, work_from(activities.rows), activities.copies, ranges)


def _emulated(found: _Events, ranges: list[Range]) -> Trace:
    launches = {match[1]: at for at in ranges if (match := EMULATED_LAUNCH.fullmatch(at.name))}
    copies, others = [], []
    for at in ranges:
        if match := EMULATED_COPY.fullmatch(at.name):
            launch = launches.get(match[1], Range("", NO_LAUNCH, NO_LAUNCH, 0))
            span = (at.start_ns, at.end_ns, at.thread)
            copies.append(Memcpy(match[2], int(match[3]), *span, launch.start_ns, launch.thread))
        elif not EMULATED_LAUNCH.fullmatch(at.name):
            others.append(at)
    rows: list[tuple[Any, ...]] = []
    open_until: dict[int, int] = {}
    spans = [(*found.span(event), event["tid"]) for event in found.of("cpu_op")]
    for start, end, thread in sorted(spans, key=lambda span: (span[0], -span[1])):
        is_outer = start >= open_until.get(thread, NO_LAUNCH)  # no operator around it on its thread
        if is_outer:
            open_until[thread] = end
        rows.append((start, end, start, end, thread, 0, False, is_outer))
    return Trace("kineto", True, work_from(rows), copies, others)
