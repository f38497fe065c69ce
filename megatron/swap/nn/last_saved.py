"""The tensors that a layer saves last: no other saved tensor is computed from them.

A checkpoint stops a layer that runs again as soon as it has all saved tensors, so there is no result to compare with
forward's. These tensors take its place: each other saved tensor flows into one of them, and shows there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST_SHARE = 8
"""A storage shows in one that has at least its elements divided by this: sums and statistics hide what they sum."""


class Flow(NamedTuple):
    """An operator: how many elements it reads, and makes or writes, by the numbers of their storages."""

    reads: Mapping[int, int]
    makes: Mapping[int, int]


class Saved(NamedTuple):
    """A saved tensor: the number of its storage, ``None`` if it has none, and its layout there."""

    number: int | None
    layout: tuple[object, ...]


def last_saved(flows: Sequence[Flow], saved: Sequence[Saved], num_given: int) -> frozenset[int]:
    """Return the places in ``saved`` of those that are computed last, each once.

    Args:
        flows: the operators of the layer, in their order.
        num_given: storages with the numbers -1 to ``-num_given`` are the layer's weights, buffers and arguments, which
            are compared in other ways.
    """
    numbers = {one.number for one in saved if one.number is not None}
    shown: set[int] = set()  # storages that show in a saved tensor
    for reads, makes in reversed(flows):
        size = max((size for number, size in makes.items() if number in numbers or number in shown), default=0)
        shown |= {number for number, read in reads.items() if number not in makes and read <= LEAST_SHARE * size}
    last = {number for number in numbers - shown if not -num_given <= number < 0}
    for _, makes in flows:  # of results of one operator (attention's and its sums) the largest is enough
        if together := makes.keys() & last:
            last -= together if makes.keys() & shown else together - {max(together, key=makes.__getitem__)}
    found: dict[object, int] = {}
    for place, one in enumerate(saved):
        if one.number is None:
            found[place] = place
        elif one.number in last:
            found.setdefault((one.number, one.layout), place)
    return frozenset(found.values())
