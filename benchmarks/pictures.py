"""Colours, bars, and a digest of the data by which a stale picture is noticed."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

OURS, PLANNED, BASELINES, LINE, TEXT = "#D55E00", "#0072B2", "#4D4D4D", "#999999", "#1E293B"
COLOURS = (OURS, PLANNED, "#009E73", "#CC79A7", "#000000", "#56B4E9")
"""Okabe and Ito's palette, which colour-blind people tell apart, and greys."""
DIGEST = "Digest"


class Picture:
    """A ``.png`` file and how to draw it. ``shown``: all values that it depends on, as plain JSON."""

    def __init__(self, path: Path, shown: Any, draw: Callable[[], Figure]) -> None:
        self.path = path
        self._digest = hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()
        self._draw = draw

    @property
    def is_current(self) -> bool:
        return self.path.exists() and digest_of(self.path) == self._digest

    def save(self) -> None:
        if not self.is_current:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._draw().savefig(self.path, metadata={DIGEST: self._digest})


def digest_of(path: Path) -> str | None:
    try:
        with Image.open(path, formats=["PNG"]) as image:
            image.load()
            found = image.info.get(DIGEST)
    except OSError:
        return None
    return None if found is None else str(found)


def new_figure(width: float, height: float, dpi: int) -> Figure:
    """Return an empty figure. Sizes are in inches."""
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(panel: Any, axis: str = "both") -> None:
    panel.grid(axis=axis, alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def bars(panel: Any, names: Sequence[str], lengths: Sequence[float], is_ours: Sequence[bool]) -> None:
    """Draw a horizontal bar for each name, from top to bottom; ours have a colour of their own."""
    colours = [OURS if ours else BASELINES for ours in is_ours]
    panel.barh(range(len(names)), lengths, height=0.62, color=colours, zorder=2)
    panel.set_yticks(range(len(names)), names, fontsize=10)
    for label, ours in zip(panel.get_yticklabels(), is_ours, strict=True):
        label.set(color=OURS if ours else TEXT, fontweight="bold" if ours else "normal")
    panel.set_ylim(len(names) - 0.4, -0.6)
    tidy(panel, "x")
