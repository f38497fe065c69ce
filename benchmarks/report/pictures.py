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
from benchmarks.report.tables import chosen
from benchmarks.rows import Row
from benchmarks.stamp import stamp, stamp_of
from benchmarks.suites.picture import draw as draw_frontier

COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce", "#b45309", "#0f766e")
NUM_LINE_SEGMENTS = 120
PLACES = (("left", (8, 6)), ("right", (-8, 6)), ("left", (8, -15)), ("right", (-8, -15)))
"""Where labels are placed beside their points, case by case."""
SHOWN = (
    "suite", "case", "method", "outcome", "step_ms_median", "step_ms_min", "step_ms_max", "device_peak_gib", "is_ours",
    "losses_equal", "loss_max_rel_diff", "reference",
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
    points: list[tuple[float, float, str]]
    """Load, step ratio, the swapped layers."""
    expected: list[tuple[float, float]]


def _line(name: str, steps: Sequence[Rung]) -> _Line | None:
    known = [(step, step.load) for step in steps if step.load is not None]
    if not known:
        return None
    points = sorted((load, step.ratio, chosen(step.row).replace("`", "")) for step, load in known)
    last, longest = known[-1][0], points[-1][0]
    loads = [longest * index / NUM_LINE_SEGMENTS for index in range(NUM_LINE_SEGMENTS + 1)]
    expected = [(load, ratio) for load in loads if (ratio := last.predicted_ratio(load)) is not None]
    return _Line(name, points, expected)


def _draw_load(lines: Sequence[_Line], path: Path) -> None:
    figure, panel = plt.subplots(figsize=(11, 6), dpi=130, layout="constrained")
    panel.axvspan(0.0, 1.0, color="#dcfce7", lw=0, zorder=0)
    for index, line in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        panel.plot([], [], "o", color=colour, label=line.name)
        if line.expected:
            panel.plot(*zip(*line.expected, strict=True), "--", color=colour, lw=1.4, alpha=0.8)
        for load, ratio, layers in line.points:
            panel.plot(load, ratio, "o", color=colour, ms=8, markeredgecolor="white")
            side, place = PLACES[index % len(PLACES)]
            panel.annotate(
                layers, (load, ratio), xytext=place, ha=side, textcoords="offset points", fontsize=9.5, color=colour
            )
    panel.plot([], [], "--", color="#475569", label="predicted by arithmetic")
    longest = max(load for line in lines for load, *_ in line.points)
    panel.set_xlim(0.0, max(1.25, 1.12 * longest))
    panel.margins(y=0.1)
    panel.text(
        0.01, 0.02, "copies out fit under forward", transform=panel.get_xaxis_transform(), fontsize=10, color="#166534"
    )
    panel.set_xlabel("time of the copies out ÷ forward time that can hide them", fontsize=11)
    panel.set_ylabel("step time ÷ the unswapped step's", fontsize=11)
    panel.set_title("Cost of swapping by load of forward", loc="left", fontsize=14, weight="bold")
    panel.grid(alpha=0.25)
    panel.legend(loc="upper left", fontsize=10, framealpha=0.95)
    figure.savefig(path)
    plt.close(figure)
