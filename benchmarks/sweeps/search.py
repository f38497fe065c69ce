"""The search for the largest value that trains."""

from collections.abc import Mapping


def following(count: int, start: int, trained: Mapping[int, bool], *, trusted: bool) -> int | None:
    """Return the index of the value to try next; ``None``: the largest that trains is known.

    The search goes upwards from the largest value that trains, in steps that double, until one fails; then it bisects.
    Where nothing has trained yet it goes downwards in the same way if ``trusted``, else it bisects at once. Nothing
    larger than a failed value is tried. A failure below a value that trains is ignored.
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
