"""The points that no other point beats in both memory and time."""

from __future__ import annotations

from collections.abc import Sequence


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points that no other equals or beats in both coordinates, by rising first coordinate.

    Of equal points the first is kept.
    """
    best: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i], i)):
        if not best or points[index][1] < points[best[-1]][1]:
            best.append(index)
    return best
