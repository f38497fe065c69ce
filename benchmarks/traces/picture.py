"""Draw one step: lanes for compute, copies out and copies in, with the memory in use below."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.traces import intervals
from benchmarks.traces.analysis import Analysis, hidden_together
from benchmarks.traces.engine import StorageCopy
from benchmarks.traces.figures import copy_spans, link
from benchmarks.traces.records import MS
from benchmarks.traces.scene import Block, Scene
from megatron.swap.common.types import format_bytes

WIDTH_PX, DPI = 1600, 100
FONT = 13
GREY, RED, INK = "#c9c9c9", "#e3122d", "#222222"
LANES = {"phase": (3.52, 0.3), "compute": (2.5, 0.9), "out": (1.3, 0.9), "in": (0.1, 0.9)}
"""Lower edge and height of each lane."""
MIN_NUMBER_PX = 17
ZOOM_BELOW = 0.6
"""A micro-batch that takes less than this fraction of the step is drawn again, larger."""


def draw(analysis: Analysis, scene: Scene, path: Path) -> None:
    """Draw ``scene`` into ``path`` (PNG)."""
    zoom = _zoom(scene)
    heights = [4.2, 2.2] + ([4.2] if zoom else [])
    figure = Figure(figsize=(WIDTH_PX / DPI, 1.7 + 1.12 * sum(heights)), dpi=DPI, layout="constrained")
    axes = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights}).tolist()
    figure.suptitle(_title(analysis, scene), fontsize=FONT + 3, ha="left", x=0.012, linespacing=1.5)
    colour = _colours(scene)
    whole = (0.0, scene.ms(scene.end_ns))
    _lanes(axes[0], analysis, scene, whole, colour)
    # In the emulation the memory marks are the observer's count of saved tensors.
    _memory(axes[1], scene, whole, "saved tensors" if analysis.trace.is_emulated else "memory in use")
    if zoom is not None:
        micro_batch, span = zoom
        _lanes(axes[2], analysis, scene, span, colour)
        axes[2].set_title(f"The same, larger: micro-batch {micro_batch}", loc="left", fontsize=FONT + 1)
    axes[-1].set_xlabel("ms since the step's first activity on the device", fontsize=FONT)
    figure.legend(handles=_legend(), loc="outside lower left", ncols=4, fontsize=FONT - 1, frameon=False)
    figure.savefig(path)


def _title(analysis: Analysis, scene: Scene) -> str:
    figures = next(figures for figures in analysis.steps if figures.step == scene.step.number)
    step_ns = scene.step.end_ns - scene.step.start_ns
    out, back = (link(scene.copies, way, analysis.compute, step_ns) for way in ("out", "in"))
    broken = sum(violation.step == scene.step.number for violation in analysis.ordering.violations)
    device = "  (CPU emulation)" if analysis.trace.is_emulated else ""
    moved = figures.copies
    first = (
        f"Step {scene.step.number}: {figures.duration_ms:,.1f} ms{device}   |   "
        f"swapped out {format_bytes(moved.swapped_out_bytes)}{_speed(out.gb_per_s)}, "
        f"in {format_bytes(moved.swapped_in_bytes)}{_speed(back.gb_per_s)}"
    )
    verdict = "every copy in order" if not broken else f"{broken} copies OUT OF ORDER"
    second = (
        f"{_percent(hidden_together(scene.copies, analysis.compute))} of the copy time hidden under compute   |   "
        f"compute waited {figures.stalled_ms:.1f} ms for copies   |   {verdict}"
    )
    return f"{first}\n{second}"


def _speed(gb_per_s: float | None) -> str:
    return "" if gb_per_s is None else f" at {gb_per_s:.1f} GB/s"


def _percent(share: float | None) -> str:
    return "nothing" if share is None else f"{100 * share:.1f} %"


def _colours(scene: Scene) -> Callable[[int], Any]:
    """Return the colour of each layer: hues in layer order, neighbours clearly different, never the red of stalls."""
    layers = {block.layer for block in scene.blocks} | {copy.layer for copy in scene.copies}
    ordered = {layer: place for place, layer in enumerate(sorted(layers))}
    palette = colormaps["turbo"](np.linspace(0.04, 0.78, max(2, len(ordered))))
    palette[1::2, :3] *= 0.82
    return lambda layer: tuple(palette[ordered[layer]])


def _zoom(scene: Scene) -> tuple[int, tuple[float, float]] | None:
    """Return the micro-batch to enlarge and its time span in ms; ``None``: no enlargement.

    The second micro-batch is chosen, since the first has no micro-batch before it.
    """
    if len(scene.micro_batches) < 2:
        return None
    number = scene.micro_batches[1]
    mine = [block for block in scene.blocks if block.micro_batch == number]
    start, end = min(block.start_ns for block in mine), max(block.end_ns for block in mine)
    if end - start > ZOOM_BELOW * (scene.end_ns - scene.start_ns):
        return None
    margin = (end - start) // 50
    return number, (scene.ms(start - margin), scene.ms(end + margin))


def _lanes(
    axes: Axes, analysis: Analysis, scene: Scene, span: tuple[float, float], colour: Callable[[int], Any]
) -> None:
    per_px = (span[1] - span[0]) / (WIDTH_PX * 0.88)
    _compute(axes, analysis, scene, span, per_px, colour)
    visible = [c for c in scene.copies if scene.ms(c.end_ns) >= span[0] and scene.ms(c.start_ns) <= span[1]]
    for direction in ("out", "in"):
        copies = sorted((c for c in visible if c.direction == direction), key=lambda copy: copy.start_ns)
        _copies(axes, scene, copies, LANES[direction], span, per_px, colour)
    for name, start, end in _phases(scene.blocks):
        left, right = max(scene.ms(start), span[0]), min(scene.ms(end), span[1])
        if right > left:
            bottom, height = LANES["phase"]
            face = "#e8eef7" if name.startswith("forward") else "#f5ece0"
            axes.broken_barh([(left, right - left)], (bottom, height), facecolors=face, edgecolors="white")
            _write(axes, (left + right) / 2, bottom + height / 2, name, right - left, per_px, "#444444")
    axes.set_xlim(*span)
    axes.set_ylim(0, 3.9)
    names = {"compute": "compute", "out": "copies out\nGPU → host", "in": "copies in\nhost → GPU"}
    axes.set_yticks([LANES[lane][0] + 0.45 for lane in names], list(names.values()), fontsize=FONT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=FONT - 1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for lane in ("out", "in"):
        axes.axhspan(LANES[lane][0], LANES[lane][0] + 0.9, color="#f6f6f6", zorder=0)


def _compute(
    axes: Axes, analysis: Analysis, scene: Scene,
    span: tuple[float, float], per_px: float, colour: Callable[[int], Any],
) -> None:  # fmt: skip
    bottom, height = LANES["compute"]
    busy = intervals.clip(analysis.compute.busy, scene.start_ns, scene.end_ns)
    busy = intervals.union(busy[:, 0], busy[:, 1], int(per_px * MS / 2))  # close gaps below one pixel
    _bars(axes, scene, busy, (bottom, height), GREY, 1)
    parts, colours = [np.empty((0, 2), np.int64)], []
    for block in scene.blocks:
        if scene.ms(block.end_ns) < span[0] or scene.ms(block.start_ns) > span[1]:
            continue
        parts.append(intervals.clip(busy, block.start_ns, block.end_ns))
        colours += [colour(block.layer)] * len(parts[-1])
        middle = scene.ms((block.start_ns + block.end_ns) / 2)
        wide = scene.ms(block.end_ns) - scene.ms(block.start_ns)
        _number(axes, block.layer, middle, bottom + height / 2, wide, per_px, colour)
    _bars(axes, scene, np.concatenate(parts), (bottom, height), colours or INK, 2)
    stalls = np.array([(stall.start_ns, stall.end_ns) for stall in scene.stalls], np.int64).reshape(-1, 2)
    _bars(axes, scene, stalls, (bottom, height), RED, 3)


def _bars(
    axes: Axes, scene: Scene, spans: np.ndarray, place: tuple[float, float], colours: Any, zorder: float
) -> None:
    """Draw ``spans``, shape (n, 2), as bars. ``colours``: one for all, or one each."""
    bars = [(scene.ms(start), (end - start) / MS) for start, end in spans]
    axes.broken_barh(bars, place, facecolors=colours, edgecolors=colours, linewidth=0.4, zorder=zorder)


def _copies(
    axes: Axes, scene: Scene, copies: list[StorageCopy], place: tuple[float, float],
    span: tuple[float, float], per_px: float, colour: Callable[[int], Any],
) -> None:  # fmt: skip
    pieces = [(copy.layer, piece) for copy in copies for piece in copy.pieces]
    spans = np.array([(piece.start_ns, piece.end_ns) for _, piece in pieces], np.int64).reshape(-1, 2)
    _bars(axes, scene, spans, place, [colour(layer) for layer, _ in pieces] or INK, 2)
    for _, of_group in groupby(copies, key=lambda copy: copy.group):
        run = list(of_group)
        start_ns, end_ns = run[0].start_ns, max(copy.end_ns for copy in run)
        middle = scene.ms((start_ns + end_ns) / 2)
        # No number between copies that are far apart.
        is_solid = 2 * intervals.total(copy_spans(run)) > end_ns - start_ns
        if is_solid and span[0] <= middle <= span[1]:
            wide = (end_ns - start_ns) / MS
            _number(axes, run[0].layer, middle, place[0] + place[1] / 2, wide, per_px, colour)


def _number(
    axes: Axes, layer: int, x: float, y: float, wide: float, per_px: float, colour: Callable[[int], Any]
) -> None:
    if wide < MIN_NUMBER_PX * per_px:
        return
    red, green, blue = colour(layer)[:3]
    ink = INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
    axes.text(x, y, str(layer), ha="center", va="center", fontsize=FONT - 2, color=ink, zorder=4, clip_on=True)


def _write(axes: Axes, x: float, y: float, text: str, wide: float, per_px: float, colour: str) -> None:
    """Write ``text`` if it fits."""
    if wide > 8.5 * len(text) * per_px:
        axes.text(x, y, text, ha="center", va="center", fontsize=FONT - 2, color=colour, zorder=4, clip_on=True)


def _phases(blocks: list[Block]) -> list[tuple[str, int, int]]:
    """Return name, start and end of each run of layers in the same pass over the same micro-batch."""
    phases: list[tuple[str, int, int]] = []
    for block in sorted(blocks, key=lambda block: block.start_ns):
        name = f"{block.what} mb{block.micro_batch}"
        if phases and phases[-1][0] == name:
            phases[-1] = (name, phases[-1][1], max(phases[-1][2], block.end_ns))
        else:
            phases.append((name, block.start_ns, block.end_ns))
    return phases


def _memory(axes: Axes, scene: Scene, span: tuple[float, float], what: str) -> None:
    axes.set_xlim(*span)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=FONT - 1)
    if not scene.memory:
        axes.text(0.5, 0.5, "no memory marks in this step", transform=axes.transAxes, ha="center", fontsize=FONT)
        axes.set_yticks([])
        return
    peak = max(num_bytes for _, num_bytes in scene.memory)
    unit, name = (2**30, "GiB") if peak >= 2**30 else (2**20, "MiB")
    at = [scene.ms(moment) for moment, _ in scene.memory]
    used = [num_bytes / unit for _, num_bytes in scene.memory]
    axes.fill_between([*at, span[1]], [*used, used[-1]], step="post", color="#3b6fb6", alpha=0.3, linewidth=0)
    axes.step([*at, span[1]], [*used, used[-1]], where="post", color="#3b6fb6", linewidth=1.4)
    top = used.index(peak / unit)
    axes.plot(at[top], used[top], "o", color=INK, markersize=6)
    right = at[top] > 0.8 * span[1]
    axes.annotate(
        f"peak {used[top]:.2f} {name}", (at[top], used[top]), xytext=(-10 if right else 10, 6),
        textcoords="offset points", ha="right" if right else "left", fontsize=FONT, color=INK,
    )  # fmt: skip
    axes.set_ylim(0, 1.2 * peak / unit)
    axes.set_ylabel(f"{what}, {name}", fontsize=FONT)


def _legend() -> list[Patch]:
    return [
        Patch(facecolor="#30b5d8", label="colour and number: layer (copies of layer 3 have the colour of layer 3)"),
        Patch(facecolor=GREY, label="other compute (embedding, loss, optimizer)"),
        Patch(facecolor=RED, label="compute waits for a copy"),
    ]
