"""Samples of a process between steps, and the verdict on them: flat, or growing."""

import gc
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import rss_bytes

KIB, MIB = 1 << 10, 1 << 20
FRACTION = 0.001  # Change from the middle third to the last that counts as flat, as a fraction
TOLERANCE: dict[str, int] = {
    "device_bytes": 64 * KIB, "reserved_bytes": 8 * MIB, "pinned_bytes": 64 * KIB, "resident_bytes": 8 * MIB,
    "num_files": 0, "num_threads": 0, "num_objects": 0,
}  # fmt: skip
"""For each metric the change that counts as flat where it is more than ``FRACTION``."""
COUNTED = {"num_files": "fd", "num_threads": "task"}
WARM_UP_STEPS = 40  # Objects made before this step are not looked at by later collections, which makes counting fast

Metrics = dict[str, int]


class Meter:
    """Writes samples of this process to a file at once. Everything repeats after ``cycle`` steps."""

    def __init__(self, path: Path, cycle: int, read: Mapping[str, Callable[[], int]]) -> None:
        self._file = path.open("w", buffering=1)
        self._cycle = cycle
        self._read = dict(read)

    def sample(self, step: int) -> None:
        if step == WARM_UP_STEPS:
            gc.collect()
            gc.freeze()
        metrics: Metrics = {}
        if step > WARM_UP_STEPS and step % self._cycle == 0:
            gc.collect()
            metrics["num_objects"] = gc.get_freeze_count() + len(gc.get_objects())
        metrics |= {metric: read() for metric, read in self._read.items()}
        metrics["resident_bytes"] = rss_bytes()
        metrics |= {name: len([*os.scandir(f"/proc/self/{part}")]) for name, part in COUNTED.items()}
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")


def changes(samples: Sequence[Metrics], cycle: int) -> list[dict[str, Any]]:
    """Return the largest change of each metric between the medians of the last two thirds, phase by phase."""
    if samples[-1]["step"] < 3 * cycle:
        raise ValueError(f"{samples[-1]['step']} steps have no three cycles of {cycle}")
    num_cycles = samples[-1]["step"] // cycle
    length, end = num_cycles // 3 * cycle, num_cycles * cycle
    starts = (end - 2 * length, end - length)
    thirds = [[sample for sample in samples if start < sample["step"] <= start + length] for start in starts]
    found = []
    for metric, tolerance in TOLERANCE.items():
        of_metric: list[dict[str, Any]] = []
        for phase in range(cycle):
            middle, last = (
                [sample[metric] for sample in third if sample["step"] % cycle == phase and metric in sample]
                for third in thirds
            )
            if not middle and not last:
                continue  # objects are counted in one phase
            if not middle or not last:
                raise ValueError(f"phase {phase} of {cycle} has no {metric} in a third of {len(samples)} steps")
            before, after = statistics.median(middle), statistics.median(last)
            allowed = max(FRACTION * before, tolerance)
            of_metric.append({"metric": metric, "phase": phase, "middle": before, "last": after, "allowed": allowed})
        if of_metric:  # what an allocator holds is read on a GPU alone
            most = max(of_metric, key=lambda change: (change["last"] - change["middle"]) - change["allowed"])
            found.append({**most, "is_flat": most["last"] - most["middle"] <= most["allowed"]})
    return found


def grown(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [change for change in row["changes"] if not change["is_flat"]]


def curve(samples: Iterable[Metrics], cycle: int, most: int) -> dict[str, list[list[int]]]:
    """Return at most ``most`` points of each metric for a picture: step and value at the end of cycles."""
    ends = [sample for sample in samples if sample["step"] % cycle == 0 and sample["step"] > WARM_UP_STEPS]
    stride = max(1, -(-len(ends) // most))
    return {
        metric: points
        for metric in TOLERANCE
        if (points := [[sample["step"], sample[metric]] for sample in ends[::stride] if metric in sample])
    }
