"""The order in which backward will need the groups.

Without pipelining it is the reverse of forward. Under 1F1B and interleaved schedules each step has the same order, so
the last step's order is expected again. The first step assumes the reverse order within a micro-batch. A wrong guess
costs time, never correctness: a group that was not prefetched is reloaded on demand.

An *episode* runs from an empty graph to the next empty graph: one micro-batch without pipelining, one step with it. A
loop that always has a graph outstanding (it keeps a step's loss during the next forward, say) never ends an episode. So
the order of an episode with more than ``MAX_OBSERVED`` groups is not learned.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from megatron.swap.common.types import GroupKey, LayerPosition
from megatron.swap.engine.handle import ForwardPass, Group

MANY = 1 << 24  # more than the groups of any episode that is learned
MAX_OBSERVED = 1 << 16  # groups up to which an episode is learned


class BackwardOrder:
    """Creates groups in forward, observes the order of backward, and predicts the next groups."""

    def __init__(self) -> None:
        # Weak: groups of a graph that is discarded without a backward must not stay here.
        self._waiting: weakref.WeakValueDictionary[GroupKey, Group] = weakref.WeakValueDictionary()
        self._num_runs: Counter[int] = Counter()
        self._num_forwards = 0
        self._expected: list[GroupKey] = []
        self._turns: dict[GroupKey, int] = {}
        self._observed = array("q")  # layer and micro-batch in turn: 16 bytes a group, and no objects
        self._num_observed = 0
        self._cursor = 0
        self._last: Group | None = None
        self._forward_pass = ForwardPass()
        self._num_after = 0

    def begin_forward(self, layer: int, position: LayerPosition) -> Group:
        """Return a new group for the next run of ``layer``, at ``position`` in its chunk."""
        if not self._waiting:
            self._begin_episode()
        if position.num_after >= self._num_after:
            self._forward_pass = ForwardPass()
        self._num_after = position.num_after
        group = Group(GroupKey(layer, self._num_runs[layer]), position, self._num_forwards, self._forward_pass)
        self._num_runs[layer] += 1
        self._num_forwards += 1
        self._waiting[group.key] = group
        return group

    def begin_backward(self, group: Group) -> bool:
        """Note that the backward of ``group`` begins. Return False if it has begun before."""
        if group.backward_begun:
            return False
        group.backward_begun = True
        group.forward_pass.begin_backward(group)
        if self._waiting.get(group.key) is group:
            del self._waiting[group.key]
        self._observe(group.key)
        self._last = group
        if self._cursor < len(self._expected) and self._expected[self._cursor] == group.key:
            self._cursor += 1
        else:
            self._resynchronise(group.key)
        return True

    def upcoming(self) -> Iterator[Group]:
        """Yield the groups whose backward comes next, nearest first, as far as the order is known."""
        if self._expected:
            for key in islice(self._expected, self._cursor, None):
                group = self._waiting.get(key)
                if group is None:
                    return  # its forward has not run yet; later groups must not fill the window
                yield group
        elif self._last is not None:
            micro_batch, sequence = self._last.key.micro_batch, self._last.sequence
            same = [g for g in self._waiting.values() if g.key.micro_batch == micro_batch and g.sequence < sequence]
            yield from sorted(same, key=lambda group: -group.sequence)

    def next_use(self, group: Group) -> int:
        """Return the expected turn of the backward of ``group``: higher means later."""
        turn = self._turns.get(group.key)
        return group.key.micro_batch * MANY + MANY - group.sequence if turn is None else turn

    @property
    def is_empty(self) -> bool:
        """Whether the backward of every group has begun, or its graph was discarded."""
        return not self._waiting

    @property
    def current(self) -> Group | None:
        """The group that backward is in, or None before the first backward of an episode."""
        return self._last

    def prefetched_bytes(self) -> int:
        """Return the bytes prefetched for groups whose backward has not begun."""
        return sum(group.prefetched_bytes for group in self._waiting.values())

    def _begin_episode(self) -> None:
        if self._observed:  # else a forward had no backward, nothing was saved, or the episode was too long
            numbers = iter(self._observed)
            self._expected = [GroupKey(layer, micro_batch) for layer, micro_batch in zip(numbers, numbers, strict=True)]
            self._turns = {key: turn for turn, key in enumerate(self._expected)}
        self._observed = array("q")
        self._num_observed = 0
        self._cursor = 0
        self._num_runs.clear()
        self._num_forwards = 0
        self._last = None

    def _observe(self, key: GroupKey) -> None:
        self._num_observed += 1
        if self._num_observed <= MAX_OBSERVED:
            self._observed.extend((key.layer, key.micro_batch))
        elif self._observed:
            self._observed = array("q")

    def _resynchronise(self, key: GroupKey) -> None:
        # The order of backward has changed (with the number of micro-batches, say).
        try:
            self._cursor = self._expected.index(key) + 1
        except ValueError:
            self._expected = []
            self._turns = {}
