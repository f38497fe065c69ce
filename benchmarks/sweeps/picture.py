"""Draw the largest value of each method as bars and, for axes that grow the model, the machine's physical limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from benchmarks import names
from benchmarks.flags import value
from benchmarks.rows import GIB, MIB, Row
from benchmarks.suites.picture import BASELINES, LINE, OURS, TEXT
from benchmarks.sweeps.axes import AXES
from benchmarks.sweeps.table import (
    LargestValue,
    MachineLimit,
    is_on_cpu,
    largest_by_method,
    machine_limit,
    params_of,
    short,
)

WIDTH, HEIGHT, HEAD_HEIGHT = 13.0, 0.62, 1.9
LABELS = 0.42
"""Fraction of the picture's width for the text to the right of the bars."""
LETTERS = 46
"""Letters of a line of a method's name, on the left."""
FAR = 6
"""The physical limit is not drawn beyond this multiple of the longest bar: the bars would vanish."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture."""
    found = largest_by_method(rows)
    axis = AXES[rows[0]["axis"]]
    size = WIDTH, HEAD_HEIGHT + HEIGHT * len(found)
    figure, panel = plt.subplots(figsize=size, dpi=130)
    # On a CPU a machine's memory is no limit of the sweep, and its models have few parameters.
    grows = axis.grows and not is_on_cpu(rows)
    lengths = [_length(one, grows) for one in found]
    limit = machine_limit(rows) if grows else None
    is_near = limit is not None and limit.params / 1e9 <= FAR * max(lengths)
    end = max([*lengths, limit.params / 1e9 if limit and is_near else 0.0]) or 1.0
    for place, (one, length) in enumerate(zip(found, lengths, strict=True)):
        color = OURS if one.is_ours else BASELINES
        panel.barh(place, length, height=0.62, color=color, zorder=2)
        if limit is not None and is_near:
            panel.barh(
                place, max(0.0, limit.params / 1e9 - length), left=length, height=0.62, color="none", edgecolor=LINE,
                hatch="////", lw=0.0, zorder=1,
            )  # fmt: skip
        _words(panel, place, one, color)
    if limit is not None and is_near:
        panel.axvline(limit.params / 1e9, color=TEXT, lw=1.2, zorder=3)
    panel.set_yticks(range(len(found)), [fill(name, LETTERS) for name in _names(found, rows)], fontsize=10)
    for label, one in zip(panel.get_yticklabels(), found, strict=True):
        label.set_color(OURS if one.is_ours else TEXT)
        label.set_fontweight("bold" if one.is_ours else "normal")
    panel.set_ylim(len(found) - 0.4, -0.6)
    panel.set_xlim(0, 1.01 * end)
    if not grows:
        panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.grid(axis="x", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(_title(rows[0]), loc="left", fontsize=14, fontweight="bold", color=TEXT)
    panel.set_xlabel(_below(axis.unit, limit, is_near), fontsize=10.5, loc="left")
    # The names on the left take the width they need; the bars share the rest with the text on the right.
    figure.canvas.draw()
    canvas: Any = figure.canvas
    renderer = canvas.get_renderer()
    names = max(label.get_window_extent(renderer).width for label in panel.get_yticklabels())
    left = (names + 18) / figure.bbox.width
    below = 0.85 / size[1]
    figure.subplots_adjust(left=left, right=1 - LABELS, top=1 - 0.5 / size[1], bottom=below)
    figure.savefig(path)
    plt.close(figure)


def _names(found: Sequence[LargestValue], rows: Sequence[Row]) -> list[str]:
    """Return the methods in words, of the largest run where there is one; those with equal words with their names."""
    shown = [one.best or one.stop or next(row for row in rows if row["method"] == one.method) for one in found]
    words = [names.method(row) for row in shown]
    return [
        f"{word} ({row['method']})" if words.count(word) > 1 else word
        for word, row in zip(words, shown, strict=True)
    ]  # fmt: skip


def _title(row: Row) -> str:
    gpu = str(row["machine"]["gpu"])
    where = "this machine" if gpu == "none" else f"one {gpu}"
    if is_on_cpu([row]) and (limit_gib := value(row, "--swap-cpu-memory-gib")) is not None:
        where = f"an emulated device of {float(limit_gib) * GIB / MIB:g} MiB"
    if row["axis"] != "depth":
        return f"The largest {row['axis']} that trains on {where}"
    shape = names.model({**row, "num_params": None, "params": None})
    return f"The largest GPT that trains on {where} (hidden size {value(row, '--hidden-size')}, {shape})"


def _length(found: LargestValue, grows: bool) -> float:
    if found.best is None:
        return 0.0
    return params_of(found.best) / 1e9 if grows else float(found.best["value"])


def _words(panel: Any, place: int, found: LargestValue, color: str) -> None:
    """Write two lines beside the bar: the largest value, and what stopped the next."""
    row = found.best
    text = "nothing that was tried trains"
    if row is not None:
        parts = [row["case"]]
        if AXES[row["axis"]].grows:
            parts.append(short(params_of(row)))
        if not is_on_cpu([row]):
            parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
        parts += [f"MFU {row['mfu']:.0%}"] if row["mfu"] is not None else []
        text = " · ".join(parts)
    at = panel.get_yaxis_transform()
    panel.text(1.015, place - 0.06, text, transform=at, va="bottom", fontsize=9.5, color=color, weight="bold")
    next_one = found.stopped_short if found.stop is None else f"next, {found.stopped_short}"
    panel.text(1.015, place + 0.06, next_one, transform=at, va="top", fontsize=9, color=TEXT)


def _below(unit: str, limit: MachineLimit | None, is_near: bool) -> str:
    if limit is None:
        return unit
    what = "hatched: up to the physical limit" if is_near else "far to the right: the physical limit"
    return f"parameters, billions\n{what}, {short(limit.params)} = ({limit.sum}) / {limit.param_bytes} bytes"
