"""The tensors that a layer saves last: no other saved tensor is computed from them.

A checkpoint stops a layer that runs again as soon as it has all saved tensors, so there is no result to compare with
forward's. These tensors take its place: each other saved tensor flows into one of them, and shows there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Flow(NamedTuple):
    """An operator: the numbers of the storages that it reads, and of those that it makes or writes to."""

    reads: frozenset[int]
    makes: frozenset[int]


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
        if makes & numbers or makes & shown:
            shown |= reads - makes
    last = {number for number in numbers - shown if not -num_given <= number < 0}
    for _, makes in flows:  # of results of one operator (attention's and its sums) one is enough
        if together := makes & last:
            last -= together if makes & shown else together - {min(together)}
    found: dict[object, int] = {}
    for place, one in enumerate(saved):
        if one.number is None:
            found[place] = place
        elif one.number in last:
            found.setdefault((one.number, one.layout), place)
    return frozenset(found.values())
