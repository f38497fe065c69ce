"""The tensors that a layer saves last: no other saved tensor is computed from them.

A checkpoint stops a layer that runs again as soon as it has all saved tensors, so there is no result to compare with
forward's. These tensors take the result's place: each other saved tensor flows into one of them, and shows there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEAST_SHARE = 8  # a storage shows in another with at least its elements / 8: sums and statistics hide their inputs


class Flow(NamedTuple):
    """An operator, by the elements that it handles of each storage's number."""

    reads: Mapping[int, int]
    makes: Mapping[int, int]  # or writes


class Saved(NamedTuple):
    """A saved tensor."""

    number: int | None  # of its storage; None without a storage
    layout: tuple[object, ...]  # in the storage
    # A possible seed, or a workspace of an operator with a result beside it. Kernels leave bytes of these unset (seeds
    # of attention without dropout, an LSTM's memory for its backward).
    is_opaque: bool = False


class Compared(NamedTuple):
    """Places of saved tensors that are compared."""

    last: frozenset[int]  # in each run
    all: frozenset[int]  # in turn
    num_saved: int  # tensors that the layer saves


def compared(flows: Sequence[Flow], saved: Sequence[Saved], num_given: int) -> Compared:
    """Return the places in ``saved`` of the tensors that ``flows`` compute last, and of all, each once.

    Storages -1 to ``-num_given`` are the layer's weights, buffers and arguments. They are compared in other ways.
    """
    numbers = {one.number for one in saved if one.number is not None}
    shown: set[int] = set()  # storages that show in a saved tensor
    for reads, makes in reversed(flows):
        size = max((size for number, size in makes.items() if number in numbers or number in shown), default=0)
        shown |= {number for number, read in reads.items() if number not in makes and read <= LEAST_SHARE * size}
    opaque = {one.number for one in saved if one.is_opaque}
    own = {number for number in numbers - opaque if not -num_given <= number < 0}
    last = own - shown
    for _, makes in flows:  # of one operator's results (attention's output and its sums) the largest is enough
        if together := makes.keys() & last:
            last -= together if makes.keys() & shown else together - {max(together, key=makes.__getitem__)}
    return Compared(_places(saved, last), _places(saved, own), len(saved))


def _places(saved: Sequence[Saved], wanted: set[int]) -> frozenset[int]:
    found: dict[object, int] = {}
    for place, one in enumerate(saved):
        if one.number is None:
            found[place] = place
        elif one.number in wanted:
            found.setdefault((one.number, one.layout), place)
    return frozenset(found.values())
