"""Do the methods of one case compute the same? Timed runs are not deterministic, so equality has to allow for noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.rows import Row

NOISE_FACTOR = 10
"""Losses are flagged when they differ from the reference's by more than this many times the noise."""
LEAST_METHODS = 5
"""So many rows make a median that one wrong method does not move."""
LARGEST_NOISE = 0.05
"""Where too few rows show the noise, a larger relative difference is not noise."""
REPEAT = "none-again"
"""The method that is `none` a second time: it differs by noise alone."""


def loss_noise(rows: Sequence[Row]) -> float | None:
    """The relative difference of losses that means nothing, from the rows of one case.

    What the reference differs by from its own first round, or its repeat from it; where both are missing, the median
    of what the others differ by from it (most of them compute the same). ``None``: too few rows to tell.
    """
    own = [row.get("loss_max_rel_diff") for row in rows if row["method"] in (row.get("reference"), REPEAT)]
    if any(own):
        return max(float(difference) for difference in own if difference is not None)
    others = [row.get("loss_max_rel_diff") for row in rows if row["method"] != row.get("reference")]
    found = [float(difference) for difference in others if difference is not None]
    return statistics.median(found) if len(found) >= LEAST_METHODS else None


def is_beyond_noise(row: Row, noise: float | None) -> bool:
    """Whether the losses of ``row`` are not those of the reference."""
    difference = row.get("loss_max_rel_diff")
    if row["losses_equal"] is not False or row["method"] == row.get("reference"):
        return False
    return difference is None or difference > (LARGEST_NOISE if noise is None else NOISE_FACTOR * noise)


def comparable(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one case without those whose losses differ by more than noise: they may train otherwise."""
    noise = loss_noise(rows)
    return [row for row in rows if not is_beyond_noise(row, noise)]


def cell(row: Row, noise: float | None) -> str | None:
    """For a table: equal, or the difference, beyond noise as other losses; ``None`` where nothing was compared."""
    if row["losses_equal"] is None:
        return None
    if row["losses_equal"]:
        return "equal"
    difference = row.get("loss_max_rel_diff")
    text = "differ" if difference is None else f"{difference:.1e}"
    return f"**other losses: {text}**" if is_beyond_noise(row, noise) and difference is not None else text
