"""Read the Chrome-trace JSON of torch.profiler, from a GPU or from the emulation on a CPU."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

from benchmarks.traces.records import (
    NO_LAUNCH,
    WITHIN_DEVICE,
    Memcpy,
    Range,
    Trace,
    TraceError,
    Work,
    in_order,
    work_from,
)

DIRECTION = re.compile(r"\b([HDP]to[HDP])\b")
EMULATED_COPY = re.compile(r"emulated copy (\d+) (\w+) (\d+)")
EMULATED_LAUNCH = re.compile(r"emulated launch (\d+)")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]


def read_kineto(path: Path) -> Trace:
    """Read ``rank-N.json`` or ``rank-N.json.gz``.

    Raises:
        TraceError: the file is no such JSON, or has no named range.
    """
    by_category = _events(path)
    annotations = by_category.get("user_annotation", [])
    if not annotations:
        raise TraceError(
            f"{path}: no named range (cat 'user_annotation') in it. Trace a run with --swap-profile: tools/profile.sh"
        )
    origin_us = min(event["ts"] for event in annotations)
    reader = _Emulated if "kernel" not in by_category and _is_emulated(annotations) else _OnGpu
    return reader(by_category, origin_us).read()


def _events(path: Path) -> dict[str, list[Event]]:
    """Return the complete events by category."""
    content = path.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        events = json.loads(content)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a whole trace of torch.profiler (JSON with 'traceEvents'): {error}") from error
    found: dict[str, list[Event]] = {}
    for event in events:
        if event.get("ph") == "X":
            found.setdefault(event.get("cat", ""), []).append(event)
    return found


def _is_emulated(annotations: list[Event]) -> bool:
    return any(EMULATED_LAUNCH.fullmatch(event["name"]) for event in annotations)


class _Reader:
    def __init__(self, by_category: dict[str, list[Event]], origin_us: float) -> None:
        self._by_category = by_category
        self._origin_us = origin_us

    def _events(self, *categories: str) -> list[Event]:
        return [event for category in categories for event in self._by_category.get(category, [])]

    def _span(self, event: Event) -> tuple[int, int]:
        """Return start and end in ns. The duration is rounded separately: adding in µs would lose digits."""
        start_ns = round((event["ts"] - self._origin_us) * 1e3)
        return start_ns, start_ns + round(event.get("dur", 0) * 1e3)

    def _ranges(self) -> list[Range]:
        events = self._events("user_annotation")
        return in_order([Range(event["name"], *self._span(event), event["tid"]) for event in events])


class _OnGpu(_Reader):
    def read(self) -> Trace:
        launches = self._launches()
        unknown = (NO_LAUNCH, NO_LAUNCH, 0)
        rows: list[tuple] = []
        for event in self._events("kernel", "gpu_memset"):
            args = event["args"]
            launch = launches.get(args.get("correlation"), unknown)
            rows.append((*self._span(event), *launch, args["stream"], event["name"].startswith("nccl"), True))
        copies = []
        for event in self._events("gpu_memcpy"):
            args = event["args"]
            launch = launches.get(args.get("correlation"), unknown)
            match = DIRECTION.search(event["name"])
            direction = match[1] if match else event["name"]
            if direction == WITHIN_DEVICE:
                rows.append((*self._span(event), *launch, args["stream"], False, True))
                continue
            span = self._span(event)
            copies.append(Memcpy(direction, args["bytes"], *span, args["stream"], launch[0], launch[2]))
        return Trace("kineto", False, work_from(rows), copies, self._ranges())

    def _launches(self) -> dict[int, tuple[int, int, int]]:
        """Return start, end and thread of the launch call by correlation; of nested calls, the outermost."""
        found: dict[int, tuple[int, int, int]] = {}
        for event in self._events(*LAUNCH_CATEGORIES):
            number = event.get("args", {}).get("correlation")
            if number:
                launch = (*self._span(event), event["tid"])
                found[number] = min(found.get(number, launch), launch)
        return found


class _Emulated(_Reader):
    def read(self) -> Trace:
        launches: dict[int, Range] = {}
        copies: list[tuple[re.Match[str], Range]] = []
        ranges = []
        for found in self._ranges():
            if match := EMULATED_LAUNCH.fullmatch(found.name):
                launches[int(match[1])] = found
            elif match := EMULATED_COPY.fullmatch(found.name):
                copies.append((match, found))
            else:
                ranges.append(found)
        return Trace("kineto", True, self._work(), [_memcpy(match, at, launches) for match, at in copies], ranges)

    def _work(self) -> Work:
        """Return the operators; those that run inside another one on their thread are not outer."""
        rows = []
        open_until: dict[int, int] = {}
        spans = [(*self._span(event), event["tid"]) for event in self._events("cpu_op")]
        for start, end, thread in sorted(spans, key=lambda span: (span[0], -span[1])):
            is_outer = start >= open_until.get(thread, NO_LAUNCH)
            if is_outer:
                open_until[thread] = end
            rows.append((start, end, start, end, thread, 0, False, is_outer))
        return work_from(rows)


def _memcpy(match: re.Match[str], at: Range, launches: dict[int, Range]) -> Memcpy:
    launch = launches.get(int(match[1]))
    launched = (launch.start_ns, launch.thread) if launch else (NO_LAUNCH, 0)
    return Memcpy(match[2], int(match[3]), at.start_ns, at.end_ns, at.thread, *launched)
