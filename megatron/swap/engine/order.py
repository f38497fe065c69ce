"""The order in which backward will need the groups.

Without pipelining it is the reverse of forward. Under 1F1B and interleaved schedules it is whatever the schedule does,
but the same in every step: so the order of the last step is expected again. Before there is one, the reverse within a
micro-batch is assumed. A wrong guess costs time, never correctness: what was not prefetched is reloaded on demand.

An *episode* runs from an empty graph to the next empty graph: one micro-batch without pipelining, one step with it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from megatron.swap.common.types import GroupKey, LayerPosition
from megatron.swap.engine.handle import ForwardPass, Group

MANY = 1 << 24
"""More groups than an episode has."""


class BackwardOrder:
    """Creates groups in forward, observes the order of backward, and predicts the next groups."""

    def __init__(self) -> None:
        # Weakly: a graph that is thrown away without a backward must not keep its groups waiting for one.
        self._waiting: weakref.WeakValueDictionary[GroupKey, Group] = weakref.WeakValueDictionary()
        self._num_runs: Counter[int] = Counter()
        self._num_forwards = 0
        self._expected: list[GroupKey] = []
        self._turns: dict[GroupKey, int] = {}
        self._observed: list[GroupKey] = []
        self._cursor = 0
        self._last: Group | None = None
        self._forward_pass = ForwardPass()
        self._num_after = 0

    def begin_forward(self, layer: int, position: LayerPosition) -> Group:
        """Return a new group, for the next run of ``layer``, which stands at ``position`` in its chunk."""
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
        """Note that the backward of ``group`` begins. Return False if it had begun before."""
        if group.backward_begun:
            return False
        group.backward_begun = True
        group.forward_pass.begin_backward(group)
        if self._waiting.get(group.key) is group:
            del self._waiting[group.key]
        self._observed.append(group.key)
        self._last = group
        if self._cursor < len(self._expected) and self._expected[self._cursor] == group.key:
            self._cursor += 1
        else:
            self._resynchronise(group.key)
        return True

    def upcoming(self) -> Iterator[Group]:
        """Yield the groups whose backward comes next, nearest first, as far as that is known."""
        if self._expected:
            for key in islice(self._expected, self._cursor, None):
                group = self._waiting.get(key)
                if group is None:
                    return  # its forward is still to come: what is needed after it must not fill the window
                yield group
        elif self._last is not None:
            micro_batch, sequence = self._last.key.micro_batch, self._last.sequence
            same = [g for g in self._waiting.values() if g.key.micro_batch == micro_batch and g.sequence < sequence]
            yield from sorted(same, key=lambda group: -group.sequence)

    def next_use(self, group: Group) -> int:
        """Return a number for when the backward of ``group`` comes, as far as that is known: the higher the later."""
        turn = self._turns.get(group.key)
        return group.key.micro_batch * MANY + MANY - group.sequence if turn is None else turn

    @property
    def current(self) -> Group | None:
        """The group that backward is in; ``None`` before the first backward of an episode."""
        return self._last

    def prefetched_bytes(self) -> int:
        """Return the bytes that were reloaded for groups whose backward has not begun."""
        return sum(group.prefetched_bytes for group in self._waiting.values())

    def _begin_episode(self) -> None:
        if self._observed:  # else there was a forward without a backward, or a group of which nothing was saved
            self._expected, self._observed = self._observed, []
            self._turns = {key: turn for turn, key in enumerate(self._expected)}
        self._cursor = 0
        self._num_runs.clear()
        self._num_forwards = 0
        self._last = None

    def _resynchronise(self, key: GroupKey) -> None:
        # Backward went another way than last time (the number of micro-batches changed, say).
        try:
            self._cursor = self._expected.index(key) + 1
        except ValueError:
            self._expected = []
            self._turns = {}
