"""Where to look next for the largest value that trains."""

from __future__ import annotations

from collections.abc import Mapping


def following(count: int, start: int, trained: Mapping[int, bool], *, trusted: bool) -> int | None:
    """The place, of ``count`` in rising order, to try next; ``None``: the largest that trains is known.

    Upwards from what trains in steps that double, until one fails; then by halves between the two. Where nothing has
    trained yet: downwards in the same way if the start is ``trusted`` to be near, else by halves at once. One failure
    above ends it: what is larger still is not tried. A failure below something that trains says nothing.

    Args:
        start: what is tried first.
        trained: what has been tried, and whether it trained.
    """
    good = max((place for place, is_good in trained.items() if is_good), default=-1)
    bad = min((place for place, is_good in trained.items() if not is_good and place > good), default=count)
    if bad - good == 1:
        return None
    if not trained:
        return start
    stride = 2 ** (len(trained) - 1)
    if bad == count:
        return min(good + stride, count - 1)
    if good < 0 and trusted:
        return max(bad - stride, 0)
    return (good + bad) // 2
