"""Draw step time against peak memory with the frontier, one panel per case."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import Bbox

from benchmarks import names
from benchmarks.rows import Row, outcome, peak_gib
from benchmarks.suites import losses
from benchmarks.suites.frontier import frontier

OURS, PLANNED, BASELINES, LINE, TEXT = "#D55E00", "#0072B2", "#4D4D4D", "#999999", "#1E293B"
"""Vermillion and blue of Okabe and Ito's palette, which colour-blind people tell apart, and greys."""
MARKERS = {OURS: "D", PLANNED: "s", BASELINES: "o"}
KINDS = {
    OURS: "Megatron Swap, chosen by flags",
    PLANNED: "Megatron Swap, planned for a budget (|)",
    BASELINES: "other methods",
}  # fmt: skip
PANEL_INCHES = (11.0, 6.6)
FAR = 1.7
"""A baseline slower than this multiple of the fastest is named below the panel instead."""
MANY = 16
"""The most points of a panel that names all. With more, the frontier, the baselines of ``ALWAYS_NAMED`` and points with
room beside them are named."""
CROWDED_HEIGHT = 1.4
"""A panel with more than `MANY` points is higher by this factor."""
ALWAYS_NAMED = ("none", "full-recompute")
MARKER_PIXELS = 9.0
LINE_PARTS = 12
HARDLY = 1.0
"""Overlaps of fewer square pixels count as none."""
AXES = {
    "allocated": "peak GPU memory, allocated", "reserved": "peak GPU memory, reserved",
    "saved": "peak memory of saved tensors",
}  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture; rows without a measured peak are named below their panel."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    shown = {case: _shown([row for row in rows if row["case"] == case]) for case in cases}
    is_crowded = any(len(points) > MANY for points in shown.values())
    size = PANEL_INCHES[0], PANEL_INCHES[1] * len(cases) * (CROWDED_HEIGHT if is_crowded else 1.0)
    figure, panels = plt.subplots(len(cases), 1, figsize=size, dpi=150, squeeze=False, layout="constrained")
    for panel, case in zip(panels[:, 0], cases, strict=True):
        _panel(panel, [row for row in rows if row["case"] == case])
    trusted = [row for case in cases for row in losses.comparable([row for row in rows if row["case"] == case])]
    _legend(figure, [row for case in cases for row in shown[case]], trusted)
    figure.canvas.draw()  # the layout is known now, labels can be placed in pixels
    for panel, case in zip(panels[:, 0], cases, strict=True):
        _labels(panel, shown[case], _best([row for row in rows if row["case"] == case]))
    figure.savefig(path)
    plt.close(figure)


def _legend(figure: Any, shown: Sequence[Row], trusted: Sequence[Row]) -> None:
    """Write the legend below the panels, where it hides no point."""
    colours = {_colour(row) for row in shown}
    handles = [
        Line2D([], [], ls="", marker=MARKERS[colour], color=colour, label=name)
        for colour, name in KINDS.items() if colour in colours
    ]  # fmt: skip
    if any(row not in trusted for row in shown):
        handles.append(Line2D([], [], ls="", marker="o", mfc="white", mec=BASELINES, label="hollow: other losses"))
    handles.append(Line2D([], [], color=LINE, lw=2, label="no method is faster with less memory"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10, frameon=False)


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are drawn: all measured ones except repeats and baselines that are far slower."""
    points = [
        row for row in rows
        if row["method"] != losses.REPEAT and row["step_ms_median"] is not None and peak_gib(row) is not None
    ]  # fmt: skip
    far_ms = FAR * min((row["step_ms_median"] for row in points), default=0.0)
    return [row for row in points if row["is_ours"] or row["step_ms_median"] <= far_ms]


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
        return f"{names.method(row)}: {outcome(row)}"
    return f"{names.method(row)}: {row['step_ms_median']:,.0f} ms, {peak:.1f} GiB"


def _colour(row: Row) -> str:
    """Return the colour of a row: baseline, ours, or ours planned for a budget."""
    if not row["is_ours"]:
        return BASELINES
    return OURS if row.get("budget_gib") is None else PLANNED


def _panel(panel: Any, rows: Sequence[Row]) -> None:
    points = _shown(rows)
    places = [_place(row) for row in points]
    best = [_place(row) for row in _best(rows) if row in points]
    if best:
        panel.plot(*zip(*best, strict=True), color=LINE, lw=2, drawstyle="steps-post", zorder=1)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    trusted = losses.comparable(rows)
    for row, place in zip(points, places, strict=True):
        color = _colour(row)
        panel.vlines(place[0], row["step_ms_min"], row["step_ms_max"], color=color, lw=1, alpha=0.6, zorder=2)
        face, edge, width = (color, "white", 0.8) if row in trusted else ("white", color, 1.6)
        budget = row.get("budget_gib")
        if budget is not None:  # a dotted line from the measured peak to the budget
            panel.hlines(place[1], *sorted((place[0], budget)), color=color, lw=1, ls=":", zorder=2)
            panel.scatter([budget], [place[1]], marker="|", s=90, color=color, zorder=2)
        panel.scatter(*place, marker=MARKERS[color], s=58, facecolor=face, zorder=3, edgecolor=edge, lw=width)
    panel.margins(x=0.16, y=0.14)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    counted = next((row for row in rows if row.get("num_params")), rows[0])
    gpu = str(rows[0]["machine"]["gpu"])
    where = "" if gpu == "none" else f" on one {gpu}"
    title = f"Training a GPT ({names.model(counted)}){where}"
    panel.set_title(title, loc="left", fontsize=15, fontweight="bold", color=TEXT, pad=26)
    what = "Step time against peak memory: lower left is better"
    what += "; the table names every point" if len(points) > MANY else ""
    panel.text(0.0, 1.02, what, transform=panel.transAxes, fontsize=11, color=TEXT, va="bottom")
    panel.set_ylabel("step time, ms (median; bar: least to most)", fontsize=11)
    absent = [_why_absent(row) for row in rows if row not in points and row["method"] != losses.REPEAT]
    note = "".join("\n" + line for line in textwrap.wrap("not drawn: " + "; ".join(absent), 120)) if absent else ""
    panel.set_xlabel(f"{AXES[rows[0].get('peak') or 'allocated']}, GiB{note}", fontsize=11)


def _labels(panel: Any, rows: Sequence[Row], best: Sequence[Row]) -> None:
    """Write each name near its point without hiding points, names or lines; a thin line connects distant names.

    Among many points some have no name: the table beside the picture has them all.
    """
    renderer = panel.figure.canvas.get_renderer()
    scale = panel.figure.dpi / 100
    places = [panel.transData.transform(_place(row)) for row in rows]
    radius = MARKER_PIXELS * scale
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in places]
    taken += _steps([panel.transData.transform(_place(row)) for row in best if row in rows])
    for row, (x, y) in zip(rows, places, strict=True):
        if (budget := row.get("budget_gib")) is not None:
            end = panel.transData.transform((budget, 0.0))[0]
            taken.append(Bbox.from_extents(min(x, end) - 3, y - radius, max(x, end) + 3, y + radius))
    frame = panel.get_window_extent(renderer)
    by_height = sorted(zip(rows, places, strict=True), key=lambda pair: (-pair[1][1], pair[1][0]))
    named = [row for row in rows if len(rows) <= MANY or row in best or row["method"] in ALWAYS_NAMED]
    for row, (x, y) in sorted(by_height, key=lambda pair: pair[0] not in named):
        if (name := _name(row, rows)) is None:
            continue
        color, weight = (_colour(row), "bold") if row["is_ours"] else (TEXT, "normal")
        text = panel.text(0, 0, name, fontsize=9.5, transform=None, zorder=4, color=color, weight=weight)
        text.set_bbox({"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.6})  # over a connecting line
        box = text.get_window_extent(renderer)
        place = _free_place(x, y, box.width, box.height, taken, frame, radius, is_near=row not in named)
        if place is None:
            text.remove()
            continue
        left, bottom = place
        text.set_position((left, bottom - box.y0))
        taken.append(Bbox.from_bounds(left - 2, bottom - 1, box.width + 4, box.height + 2))
        end = min(max(x, left), left + box.width), min(max(y, bottom), bottom + box.height)
        if max(abs(end[0] - x), abs(end[1] - y)) > 1.5 * radius:
            inverse = panel.transData.inverted()
            (x0, y0), (x1, y1) = inverse.transform((x, y)), inverse.transform(end)
            panel.plot([x0, x1], [y0, y1], color=LINE, lw=0.8, zorder=1.5, scalex=False, scaley=False)
            taken += _line((x, y), end)


def _name(row: Row, rows: Sequence[Row]) -> str | None:
    """Return a point's label; ``None``: the run of the same budget that planned itself has a label for both."""
    if row.get("budget_gib") is None:
        return names.method(row)
    same = [other for other in rows if names.budget(other) == names.budget(row)]
    if len({names.is_plan_file(other) for other in same}) == 1:
        return names.method(row)
    return f"budget {names.budget(row)} GiB: auto, plan file" if not names.is_plan_file(row) else None


def _steps(corners: Sequence[Any]) -> list[Bbox]:
    """Return thin boxes over the steps of the frontier."""
    found = []
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        found.append(Bbox.from_extents(x0, y0 - 2, x1, y0 + 2))
        found.append(Bbox.from_extents(x1 - 2, min(y0, y1), x1 + 2, max(y0, y1)))
    return found


def _line(start: tuple[float, float], end: tuple[float, float]) -> list[Bbox]:
    """Return small boxes along a line."""
    (x0, y0), (x1, y1) = start, end
    parts = [index / LINE_PARTS for index in range(1, LINE_PARTS)]
    spots = [(x0 + part * (x1 - x0), y0 + part * (y1 - y0)) for part in parts]
    return [Bbox.from_extents(x - 2, y - 2, x + 2, y + 2) for x, y in spots]


def _free_place(
    x: float, y: float, width: float, height: float, taken: Sequence[Bbox], frame: Bbox, radius: float, *, is_near: bool
) -> tuple[float, float] | None:
    """Return the lower left corner (pixels) of a box near (x, y), in the first of widening rings with least overlap.

    With ``is_near`` only a place to the right or the left without overlap will do; ``None``: there is none.
    """
    best, least = (x, y), float("inf")
    for ring in range(1, 2 if is_near else 13):
        gap = radius * (0.4 + 1.6 * ring)
        tries = [
            (x + radius + 3, y - height / 2), (x - radius - 3 - width, y - height / 2),
            (x - width / 2, y + gap), (x - width / 2, y - gap - height),
            (x + radius, y + gap * 0.7), (x + radius, y - gap * 0.7 - height),
            (x - width - radius, y + gap * 0.7), (x - width - radius, y - gap * 0.7 - height),
        ]  # fmt: skip
        for left, bottom in tries[:2] if is_near else tries:
            box = Bbox.from_bounds(left, bottom, width, height)
            hidden = sum(_overlap(box, other) for other in taken)
            outside = width * height - _overlap(box, frame)
            if hidden + 4 * outside < HARDLY:
                return left, bottom
            if hidden + 4 * outside < least:
                best, least = (left, bottom), hidden + 4 * outside
    return None if is_near else best


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else float(both.width * both.height)
