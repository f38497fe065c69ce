"""Compare the losses of one case's methods. Timed runs are not deterministic, so the comparison allows for noise."""

import statistics
from collections.abc import Sequence

from benchmarks.rows import Row

NOISE_FACTOR = 10  # Losses are flagged when they differ from the reference's by more than this many times the noise
LEAST_METHODS = 5  # Number of rows with which one wrong method does not move the median
LARGEST_NOISE = 0.05  # The largest relative difference that counts as noise where too few rows show it
REPEAT = "none-again"  # The method that repeats `none`: it differs from `none` by noise alone


def loss_noise(rows: Sequence[Row]) -> float | None:
    """Estimate the noise of one case: the relative difference of losses between equal computations.

    The estimate is the largest difference between rounds of the reference, or between the reference and its repeat.
    Without either it is the median difference of the other methods, most of which compute the same. ``None``: there
    are too few rows.
    """
    own = [row.get("loss_max_rel_diff") for row in rows if row["method"] in (row.get("reference"), REPEAT)]
    if any(own):
        return max(float(difference) for difference in own if difference is not None)
    others = [row.get("loss_max_rel_diff") for row in rows if row["method"] != row.get("reference")]
    found = [float(difference) for difference in others if difference is not None]
    return statistics.median(found) if len(found) >= LEAST_METHODS else None


def is_beyond_noise(row: Row, noise: float | None) -> bool:
    difference = row.get("loss_max_rel_diff")
    if row["losses_equal"] is not False or row["method"] == row.get("reference"):
        return False
    return difference is None or difference > (LARGEST_NOISE if noise is None else NOISE_FACTOR * noise)


def comparable(rows: Sequence[Row]) -> list[Row]:
    noise = loss_noise(rows)
    return [row for row in rows if not is_beyond_noise(row, noise)]


def cell(row: Row, noise: float | None) -> str | None:
    """Return the table cell for a row's losses; ``None``: they were not compared."""
    if row["losses_equal"] is None:
        return None
    if row["losses_equal"]:
        return "equal"
    difference = row.get("loss_max_rel_diff")
    text = "differ" if difference is None else f"{difference:.1e}"
    return f"**other losses: {text}**" if is_beyond_noise(row, noise) and difference is not None else text
