"""Draw what autograd holds under each method as bars, one panel per case: the picture without a GPU, without times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from benchmarks import names
from benchmarks.flags import value
from benchmarks.rows import GIB, MIB, Row, outcome, peak_gib
from benchmarks.suites.picture import BASELINES, OURS, TEXT

WIDTH, BAR_HEIGHT, HEAD_HEIGHT = 11.0, 0.42, 1.3
"""Inches: the picture, a bar with its gap, and title and axis of a panel."""


def draw_saved(rows: Sequence[Row], path: Path) -> None:
    """Write the picture. All panels have one scale, so that cases can be compared."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    by_case = [[row for row in rows if row["case"] == case] for case in cases]
    heights = [HEAD_HEIGHT + BAR_HEIGHT * len(mine) for mine in by_case]
    figure, panels = plt.subplots(
        len(cases), 1, figsize=(WIDTH, sum(heights)), dpi=130, squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    largest = max(_held_mib(row) or 0.0 for row in rows) or 1.0
    for panel, mine in zip(panels[:, 0], by_case, strict=True):
        _panel(panel, mine, largest)
    colors = {"Megatron Swap": OURS, "other methods": BASELINES}
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def _panel(panel: Any, rows: Sequence[Row], largest: float) -> None:
    for place, row in enumerate(rows):
        color = OURS if row["is_ours"] else BASELINES
        held = _held_mib(row)
        panel.barh(place, held or 0.0, height=0.62, color=color, zorder=2)
        if (budget := row["budget_gib"]) is not None:
            panel.plot([budget * GIB / MIB] * 2, [place - 0.4, place + 0.4], color=TEXT, lw=1.5, zorder=3)
        panel.text((held or 0.0) + 0.01 * largest, place, _words(row, held), va="center", fontsize=9.5, color=TEXT)
    panel.set_yticks(range(len(rows)), [names.method(row) for row in rows], fontsize=10)
    for label, row in zip(panel.get_yticklabels(), rows, strict=True):
        label.set_color(OURS if row["is_ours"] else TEXT)
        label.set_fontweight("bold" if row["is_ours"] else "normal")
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xlim(0, 1.45 * largest)  # room for the words beside the longest bar
    panel.grid(axis="x", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    layers, hidden, length = (value(rows[0], f"--{name}") for name in ("num-layers", "hidden-size", "seq-length"))
    title = f"{layers} layers, hidden size {hidden}, {length} tokens: what autograd holds at the peak"
    panel.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=TEXT)
    lines = "; line: the budget" if any(row["budget_gib"] is not None for row in rows) else ""
    panel.set_xlabel(f"saved tensors, MiB (counted on a CPU{lines})", fontsize=10, loc="left")


def _held_mib(row: Row) -> float | None:
    held = peak_gib(row)
    return None if held is None else held * GIB / MIB


def _words(row: Row, held: float | None) -> str:
    if row["losses"] is None:
        return outcome(row)
    words = ["not counted: its own hooks hide the tensors" if held is None else f"{held:.1f} MiB"]
    if row["losses_equal"] is not None and row["method"] != row["reference"]:
        words.append("losses equal to the bit" if row["losses_equal"] else "OTHER LOSSES")
    words += [outcome(row)] if row["outcome"] != "ok" else []
    return " · ".join(words)
