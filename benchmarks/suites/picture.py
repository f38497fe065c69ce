"""Draw step time against peak memory with the frontier, one panel per case."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
from matplotlib.transforms import Bbox

from benchmarks.rows import Row, peak_gib
from benchmarks.suites import losses
from benchmarks.suites.frontier import frontier

OURS, PLANNED, BASELINES, LINE, TEXT = "#c2410c", "#15803d", "#475569", "#94a3b8", "#1e293b"
PANEL_INCHES = (12.0, 7.2)
FAR = 2.5
"""A baseline slower than this multiple of the fastest, and not on the frontier, is named below the panel instead."""
MARKER_PIXELS = 9.0
AXES = {
    "allocated": "peak device memory allocated", "reserved": "peak device memory reserved",
    "saved": "peak memory of saved tensors",
}  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture; rows without a measured peak are named below their panel."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    size = PANEL_INCHES[0], PANEL_INCHES[1] * len(cases)
    figure, panels = plt.subplots(len(cases), 1, figsize=size, dpi=130, squeeze=False, layout="constrained")
    for panel, case in zip(panels[:, 0], cases, strict=True):
        _panel(panel, [row for row in rows if row["case"] == case])
    figure.canvas.draw()  # the layout is known now, labels can be placed in pixels
    for panel, case in zip(panels[:, 0], cases, strict=True):
        _labels(panel, _shown([row for row in rows if row["case"] == case]))
    figure.savefig(path)
    plt.close(figure)


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are drawn: all measured ones except baselines that are far slower."""
    points = [row for row in rows if row["step_ms_median"] is not None and peak_gib(row) is not None]
    best = _best(rows)
    far_ms = FAR * min((row["step_ms_median"] for row in points), default=0.0)
    return [row for row in points if row in best or row["is_ours"] or row["step_ms_median"] <= far_ms]


def _best(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one case on the frontier, by rising peak; rows with other losses are left out."""
    measured = [row for row in losses.comparable(rows) if row["step_ms_median"] is not None]
    known = [row for row in measured if peak_gib(row) is not None]
    return [known[index] for index in frontier([_place(row) for row in known])]


def _place(row: Row) -> tuple[float, float]:
    """Return peak (GiB) and step time (ms) of a measured row."""
    peak = peak_gib(row)
    assert peak is not None
    return peak, float(row["step_ms_median"])


def _why_absent(row: Row) -> str:
    peak = peak_gib(row)
    if row["step_ms_median"] is None or peak is None:
        return f"{row['method']}: {row['outcome']}"
    return f"{row['method']}: {row['step_ms_median']:,.0f} ms, {peak:.1f} GiB"


def _colour(row: Row) -> str:
    """Return the colour of a row: baseline, ours, or ours planned for a budget."""
    if not row["is_ours"]:
        return BASELINES
    return OURS if row.get("budget_gib") is None else PLANNED


def _panel(panel: Any, rows: Sequence[Row]) -> None:
    points = _shown(rows)
    places = [_place(row) for row in points]
    if places:
        best = [_place(row) for row in _best(rows)]
        panel.plot(*zip(*best, strict=True), color=LINE, lw=2, drawstyle="steps-post", zorder=1, label="frontier")
    # Logarithmic, so that one very slow method does not flatten the frontier.
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    trusted = losses.comparable(rows)
    for row, place in zip(points, places, strict=True):
        low, high = row["step_ms_min"], row["step_ms_max"]
        color = _colour(row)
        panel.vlines(place[0], low, high, color=color, lw=1, alpha=0.6, zorder=2)
        marker = "D" if row["is_ours"] else "o"
        face, edge, width = (color, "white", 0.8) if row in trusted else ("white", color, 1.6)
        budget = row.get("budget_gib")
        if budget is not None:  # a dotted line from the measured peak to the budget
            panel.hlines(place[1], *sorted((place[0], budget)), color=color, lw=1, ls=":", zorder=2)
            panel.scatter([budget], [place[1]], marker="|", s=90, color=color, zorder=2)
        panel.scatter(*place, marker=marker, s=52, facecolor=face, zorder=3, edgecolor=edge, lw=width)
    panel.margins(x=0.14, y=0.12)
    panel.grid(alpha=0.25)
    panel.set_title(f"{rows[0]['suite']}: {rows[0]['case']}", loc="left", fontsize=14, fontweight="bold")
    panel.set_ylabel("step, ms, logarithmic (median; bar: least to most)", fontsize=11)
    absent = [_why_absent(row) for row in rows if row not in points]
    note = "".join("\n" + line for line in textwrap.wrap("outside: " + "; ".join(absent), 130)) if absent else ""
    panel.set_xlabel(f"{AXES[rows[0].get('peak') or 'allocated']}, GiB{note}", fontsize=11)
    all_kinds = [
        ("Megatron Swap", OURS, "D"),
        ("Megatron Swap, planned; |: its budget", PLANNED, "D"),
        ("baselines", BASELINES, "o"),
    ]  # fmt: skip
    shown = {_colour(row) for row in points}
    kinds = [kind for kind in all_kinds if kind[1] in shown]
    for name, color, marker in kinds:
        panel.scatter([], [], color=color, marker=marker, label=name)
    if any(row not in trusted for row in points):
        panel.scatter([], [], facecolor="white", edgecolor=BASELINES, lw=1.6, label="hollow: other losses")
    panel.legend(loc="upper right", fontsize=10, framealpha=0.9)


def _labels(panel: Any, rows: Sequence[Row]) -> None:
    """Write each name near its point without hiding points or names; a thin line connects distant names."""
    renderer = panel.figure.canvas.get_renderer()
    scale = panel.figure.dpi / 100
    places = [panel.transData.transform(_place(row)) for row in rows]
    radius = MARKER_PIXELS * scale
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in places]
    taken.append(panel.get_legend().get_window_extent(renderer))
    frame = panel.get_window_extent(renderer)
    for row, (x, y) in sorted(zip(rows, places, strict=True), key=lambda pair: (-pair[1][1], pair[1][0])):
        color, weight = (_colour(row), "bold") if row["is_ours"] else (TEXT, "normal")
        text = panel.text(0, 0, row["method"], fontsize=9.5, transform=None, zorder=4, color=color, weight=weight)
        text.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.6})  # over the frontier's line
        box = text.get_window_extent(renderer)
        left, bottom = _free_place(x, y, box.width, box.height, taken, frame, radius)
        text.set_position((left, bottom - box.y0))
        taken.append(Bbox.from_bounds(left - 2, bottom - 1, box.width + 4, box.height + 2))
        end = min(max(x, left), left + box.width), min(max(y, bottom), bottom + box.height)
        if max(abs(end[0] - x), abs(end[1] - y)) > 1.5 * radius:
            inverse = panel.transData.inverted()
            (x0, y0), (x1, y1) = inverse.transform((x, y)), inverse.transform(end)
            panel.plot([x0, x1], [y0, y1], color=LINE, lw=0.8, zorder=1.5, scalex=False, scaley=False)


def _free_place(
    x: float, y: float, width: float, height: float, taken: Sequence[Bbox], frame: Bbox, radius: float
) -> tuple[float, float]:
    """Return the lower left corner (pixels) of a box near (x, y), in the first of widening rings with least overlap."""
    best, least = (x, y), float("inf")
    for ring in range(1, 9):
        gap = radius * (0.4 + 1.6 * ring)
        tries = [
            (x + radius + 3, y - height / 2), (x - radius - 3 - width, y - height / 2),
            (x - width / 2, y + gap), (x - width / 2, y - gap - height),
            (x + radius, y + gap * 0.7), (x + radius, y - gap * 0.7 - height),
            (x - width - radius, y + gap * 0.7), (x - width - radius, y - gap * 0.7 - height),
        ]  # fmt: skip
        for left, bottom in tries:
            box = Bbox.from_bounds(left, bottom, width, height)
            hidden = sum(_overlap(box, other) for other in taken)
            outside = width * height - _overlap(box, frame)
            if hidden + 4 * outside < least:
                best, least = (left, bottom), hidden + 4 * outside
        if least <= 0:
            break
    return best


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else float(both.width * both.height)
