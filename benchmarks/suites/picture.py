"""The pictures of a suite: step time against peak memory; without a GPU, what autograd holds under each method."""

import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from matplotlib.transforms import Bbox

from benchmarks import names
from benchmarks.pictures import BASELINES, LINE, OURS, PLANNED, TEXT, bars, new_figure, tidy
from benchmarks.rows import GIB, MIB, Row, by_case, outcome, peak_gib
from benchmarks.suites import losses
from benchmarks.suites.ranking import on_frontier

KINDS = {
    OURS: ("D", "Megatron Swap, chosen by flags"),
    PLANNED: ("s", "Megatron Swap, planned for a budget (|)"),
    BASELINES: ("o", "other methods"),
}
"""The marker of each colour, and what it stands for."""
PANEL_INCHES = (11.0, 6.6)
FAR = 1.7  # A baseline slower than this multiple of the fastest is named below the panel instead
MANY = 16
"""The most points of a panel that names all. With more, the frontier and the baselines of ``ALWAYS_NAMED`` are named,
and the panel is ``CROWDED_HEIGHT`` times as high."""
CROWDED_HEIGHT = 1.4
ALWAYS_NAMED = ("none", "full-recompute")
RADIUS = 13.0  # Pixels around a point that no name covers
AXES = {
    "allocated": "peak GPU memory, allocated", "reserved": "peak GPU memory, reserved",
    "saved": "peak memory of saved tensors",
}  # fmt: skip


def draw(rows: Sequence[Row]) -> Figure:
    """Draw a panel for each case; rows without a measured peak are named below theirs."""
    cases = list(by_case(rows).values())
    shown = [_shown(mine) for mine in cases]
    crowded = CROWDED_HEIGHT if any(len(points) > MANY for points in shown) else 1.0
    figure = new_figure(PANEL_INCHES[0], PANEL_INCHES[1] * len(cases) * crowded, 150)
    panels = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for panel, mine, points in zip(panels, cases, shown, strict=True):
        _panel(panel, mine, points)
    colours = {_colour(row) for points in shown for row in points}
    handles = [
        Line2D([], [], ls="", marker=marker, color=colour, label=name)
        for colour, (marker, name) in KINDS.items() if colour in colours
    ]  # fmt: skip
    if any(row not in losses.comparable(mine) for mine, points in zip(cases, shown, strict=True) for row in points):
        handles.append(Line2D([], [], ls="", marker="o", mfc="white", mec=BASELINES, label="hollow: other losses"))
    handles.append(Line2D([], [], color=LINE, lw=2, label="no method is faster with less memory"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    figure.canvas.draw()  # the layout is known now, labels can be placed in pixels
    for panel, mine, points in zip(panels, cases, shown, strict=True):
        _labels(panel, points, on_frontier(mine))
    return figure


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are drawn: all measured ones except repeats and baselines that are far slower."""
    points = [row for row in rows if row["method"] != losses.REPEAT and _is_measured(row)]
    far_ms = FAR * min((row["step_ms_median"] for row in points), default=0.0)
    return [row for row in points if row["is_ours"] or row["step_ms_median"] <= far_ms]


def _is_measured(row: Row) -> bool:
    return row["step_ms_median"] is not None and peak_gib(row) is not None


def _place(row: Row) -> tuple[float, float]:
    return peak_gib(row) or 0.0, float(row["step_ms_median"])


def _colour(row: Row) -> str:
    if not row["is_ours"]:
        return BASELINES
    return OURS if row.get("budget_gib") is None else PLANNED


def _panel(panel: Any, rows: Sequence[Row], points: Sequence[Row]) -> None:
    best = [_place(row) for row in on_frontier(rows) if row in points]
    if best:
        panel.plot(*zip(*best, strict=True), color=LINE, lw=2, drawstyle="steps-post", zorder=1)
    panel.yaxis.set_major_locator(MaxNLocator(nbins=9, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    trusted = losses.comparable(rows)
    for row in points:
        place, colour = _place(row), _colour(row)
        panel.vlines(place[0], row["step_ms_min"], row["step_ms_max"], color=colour, lw=1, alpha=0.6, zorder=2)
        face, edge, width = (colour, "white", 0.8) if row in trusted else ("white", colour, 1.6)
        budget = row.get("budget_gib")
        if budget is not None:  # a dotted line from the measured peak to the budget
            panel.hlines(place[1], *sorted((place[0], budget)), color=colour, lw=1, ls=":", zorder=2)
            panel.scatter([budget], [place[1]], marker="|", s=90, color=colour, zorder=2)
        panel.scatter(*place, marker=KINDS[colour][0], s=58, facecolor=face, zorder=3, edgecolor=edge, lw=width)
    panel.margins(x=0.16, y=0.14)
    tidy(panel)
    counted = next((row for row in rows if row.get("num_params")), rows[0])
    gpu = str(rows[0]["machine"]["gpu"])
    title = f"Training a GPT ({names.model(counted)}){'' if gpu == 'none' else f' on one {gpu}'}"
    panel.set_title(title, loc="left", fontsize=15, fontweight="bold", color=TEXT, pad=26)
    what = "Step time against peak memory: lower left is better"
    what += "; the table names every point" if len(points) > MANY else ""
    panel.text(0.0, 1.02, what, transform=panel.transAxes, fontsize=11, color=TEXT, va="bottom")
    panel.set_ylabel("step time, ms (median; bar: least to most)", fontsize=11)
    absent = [_why_absent(row) for row in rows if row not in points and row["method"] != losses.REPEAT]
    note = textwrap.fill("not drawn: " + "; ".join(absent), 120) if absent else ""
    panel.set_xlabel(f"{AXES[rows[0].get('peak') or 'allocated']}, GiB\n{note}".rstrip(), fontsize=11)


def _why_absent(row: Row) -> str:
    if not _is_measured(row):
        return f"{names.method(row)}: {outcome(row)}"
    return f"{names.method(row)}: {row['step_ms_median']:,.0f} ms, {peak_gib(row):.1f} GiB"


def _labels(panel: Any, rows: Sequence[Row], best: Sequence[Row]) -> None:
    """Write each name near its point, where it covers least; a thin line leads to distant ones."""
    places = [panel.transData.transform(_place(row)) for row in rows]
    budgets = [(row["budget_gib"], row["step_ms_median"]) for row in rows if row.get("budget_gib") is not None]
    marks = [*places, *(panel.transData.transform(budget) for budget in budgets)]
    taken = [Bbox.from_extents(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in marks]
    for row, (x, y) in sorted(zip(rows, places, strict=True), key=lambda pair: (-pair[1][1], pair[1][0])):
        name = _name(row, rows)
        if name is None or (len(rows) > MANY and row not in best and row["method"] not in ALWAYS_NAMED):
            continue
        colour, weight = (_colour(row), "bold") if row["is_ours"] else (TEXT, "normal")
        text = panel.annotate(
            name, (x, y), (x, y), xycoords="figure pixels", fontsize=9.5, color=colour, weight=weight, zorder=4,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.6},
            arrowprops={"arrowstyle": "-", "color": LINE, "lw": 0.8, "shrinkA": 0, "shrinkB": 5},
        )  # fmt: skip
        size = text.get_window_extent()
        box = min(_boxes(x, y, size.width, size.height), key=lambda box: _hidden(box, taken, panel.bbox))
        text.set_position((box.x0, box.y0 + (y - size.y0)))
        taken.append(box)


def _name(row: Row, rows: Sequence[Row]) -> str | None:
    """Return a point's label; ``None``: the run of the same budget that planned itself has a label for both."""
    same = [other for other in rows if names.budget(other) == names.budget(row)]
    if row.get("budget_gib") is None or len({names.is_plan_file(other) for other in same}) == 1:
        return names.method(row)
    return f"budget {names.budget(row)} GiB: auto, plan file" if not names.is_plan_file(row) else None


def _boxes(x: float, y: float, width: float, height: float) -> list[Bbox]:
    """Return places for a name of this size around (x, y), in widening rings."""
    found = []
    for ring in range(1, 13):
        gap = RADIUS * (0.4 + 1.6 * ring)
        right, left, middle = x + RADIUS + 3, x - RADIUS - 3 - width, x - width / 2
        above, below = y + gap * 0.7, y - gap * 0.7 - height
        corners = [(right, y - height / 2), (left, y - height / 2)] if ring == 1 else []
        corners += [(middle, y + gap), (middle, y - gap - height)]
        corners += [(right, above), (right, below), (left, above), (left, below)]
        found += [Bbox.from_bounds(*corner, width, height) for corner in corners]
    return found


def _hidden(box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> float:
    outside = box.width * box.height - _overlap(box, frame)
    return round(sum(_overlap(box, other) for other in taken) + 4 * outside)


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else float(both.width * both.height)


def draw_saved(rows: Sequence[Row]) -> Figure:
    held = [(peak_gib(row) or 0.0) * GIB / MIB for row in rows]
    figure = new_figure(11.0, 1.0 + 0.42 * len(rows), 130)
    panel = figure.subplots()
    bars(panel, [f"{row['case']}: {names.method(row)}" for row in rows], held, [row["is_ours"] for row in rows])
    for place, (row, mib) in enumerate(zip(rows, held, strict=True)):
        panel.text(mib, place, f" {_words(row, mib)}", va="center", fontsize=9.5, color=TEXT)
    panel.set_xlim(0, 1.45 * max(held))  # room for the words beside the longest bar
    panel.set_xlabel("saved tensors at the peak, MiB (counted on a CPU)", fontsize=10, loc="left")
    return figure


def _words(row: Row, held: float) -> str:
    if row["losses"] is None:
        return outcome(row)
    words = ["not counted: its own hooks hide the tensors" if not held else f"{held:.1f} MiB"]
    if row["losses_equal"] is not None and row["method"] != row["reference"]:
        words.append("losses equal to the bit" if row["losses_equal"] else "OTHER LOSSES")
    words += [outcome(row)] if row["outcome"] != "ok" else []
    return " · ".join(words)
