"""The report's own pictures. Each carries a digest of the data it shows, so that a stale one is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.report.overhead import Rung
from benchmarks.rows import Row
from benchmarks.stamp import stamp, stamp_of
from benchmarks.suites.picture import draw as draw_frontier

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#56B4E9")
"""Of Okabe and Ito's palette; with a marker of its own each, for readers who cannot tell some of them apart."""
MARKERS = ("D", "s", "o", "^", "v", "P")
NUM_LINE_SEGMENTS = 120
SHOWN = (
    "suite", "case", "method", "outcome", "step_ms_median", "step_ms_min", "step_ms_max", "device_peak_gib", "is_ours",
    "losses_equal", "loss_max_rel_diff", "reference", "flags", "num_params",
)  # fmt: skip
SHOWN_WHERE_THERE = ("budget_gib", "peak", "device_reserved_gib")
"""Fields shown where a row says which peak counts; older rows do not."""


class Picture:
    """A file and how to draw it.

    Args:
        path: a ``.png``.
        shown: all values that the picture depends on, as plain JSON.
        draw: writes the file.
    """

    def __init__(self, path: Path, shown: Any, draw: Callable[[Path], None]) -> None:
        self.path = path
        self._digest = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
        self._draw = draw

    @property
    def is_current(self) -> bool:
        """Return whether the file exists and shows these values."""
        return self.path.exists() and stamp_of(self.path) == self._digest

    def draw(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._draw(self.path)
        stamp(self.path, self._digest)


def frontier_picture(path: Path, rows: Sequence[Row]) -> Picture:
    """Return the picture of step time against peak memory for one case."""
    shown = [{field: row.get(field) for field in SHOWN} for row in rows]
    for values, row in zip(shown, rows, strict=True):
        if row.get("peak") is not None:
            values.update({field: row[field] for field in SHOWN_WHERE_THERE})
    return Picture(path, shown, lambda target: draw_frontier(rows, target))


def load_picture(path: Path, series: dict[str, list[Rung]]) -> Picture:
    """Return the picture of step times, measured and predicted, against the load of forward by copies out."""
    lines = [line for name, steps in series.items() if (line := _line(name, steps)) is not None]
    return Picture(path, [asdict(line) for line in lines], lambda target: _draw_load(lines, target))


@dataclass(frozen=True)
class _Line:
    """One case."""

    name: str
    points: list[tuple[float, float]]
    """Load and step ratio."""
    expected: list[tuple[float, float]]


def _line(name: str, steps: Sequence[Rung]) -> _Line | None:
    known = [(step, step.load) for step in steps if step.load is not None]
    if not known:
        return None
    points = sorted((load, step.ratio) for step, load in known)
    last, longest = known[-1][0], points[-1][0]
    loads = [longest * index / NUM_LINE_SEGMENTS for index in range(NUM_LINE_SEGMENTS + 1)]
    expected = [(load, ratio) for load in loads if (ratio := last.predicted_ratio(load)) is not None]
    return _Line(name, points, expected)


def _draw_load(lines: Sequence[_Line], path: Path) -> None:
    figure, panel = plt.subplots(figsize=(11, 6.6), dpi=150, layout="constrained")
    panel.axvspan(0.0, 1.0, color="#F1F5F9", lw=0, zorder=0)
    for index, line in enumerate(lines):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        panel.plot([], [], marker, color=colour, label=line.name)
        if line.expected:
            panel.plot(*zip(*line.expected, strict=True), "--", color=colour, lw=1.4, alpha=0.8)
        for load, ratio in line.points:
            panel.plot(load, ratio, marker, color=colour, ms=8, markeredgecolor="white")
    panel.plot([], [], "--", color="#4D4D4D", label="predicted by arithmetic")
    longest = max(load for line in lines for load, _ in line.points)
    panel.set_xlim(0.0, max(1.25, 1.12 * longest))
    panel.margins(y=0.1)
    panel.text(
        0.01, 0.97, "copies fit under forward", transform=panel.get_xaxis_transform(), fontsize=10, color="#4D4D4D",
        va="top",
    )  # fmt: skip
    panel.set_xlabel("time of the copies to host memory ÷ forward time that can hide them", fontsize=11)
    panel.set_ylabel("step time ÷ step time without offload", fontsize=11)
    title = "Offloading costs time when copies take longer than forward"
    panel.set_title(title, loc="left", fontsize=14, weight="bold", pad=12)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    figure.savefig(path)
    plt.close(figure)
