"""The order of backward: guessed at first, learned afterwards, robust against every other order."""

import itertools
import sys
from collections.abc import Sequence

import pytest
import torch

from megatron.swap.common.types import Action, GroupKey, LayerPosition, Site
from megatron.swap.engine.decision import Decision, Reason
from megatron.swap.engine.handle import Group, Handle
from megatron.swap.engine.order import BackwardOrder
from tests.engine import Step, interleaved, one_after_the_other, one_forward_one_backward


def at(num_after: int) -> LayerPosition:
    """Return the position of a layer with so many layers after it."""
    return LayerPosition(num_after, 0, ends_in_loss=True)


Foretold = list[tuple[GroupKey, list[GroupKey]]]
"""Each group that began, and the groups predicted to follow."""


def play(order: BackwardOrder, schedule: Sequence[Step], layers_per_chunk: int) -> Foretold:
    """Play forward and backward of one step."""
    groups: dict[tuple[int, int], list[Group]] = {}
    foretold: Foretold = []
    for what, chunk, mb in schedule:
        if what == "F":
            numbers = range(chunk * layers_per_chunk, (chunk + 1) * layers_per_chunk)
            groups[chunk, mb] = [order.begin_forward(layer, at(numbers[-1] - layer)) for layer in numbers]
        else:
            for group in reversed(groups.pop((chunk, mb))):
                assert order.begin_backward(group)
                foretold.append((group.key, [later.key for later in order.upcoming()]))
    return foretold


def keys(*pairs: tuple[int, int]) -> list[GroupKey]:
    return [GroupKey(*pair) for pair in pairs]


def test_what_is_foretold_at_first_and_in_the_second_step() -> None:
    order = BackwardOrder()
    first = play(order, one_forward_one_backward(2), 3)
    reverse = [keys((1, 0), (0, 0)), keys((0, 0)), [], keys((1, 1), (0, 1))]
    assert [upcoming for _, upcoming in first[:4]] == reverse, "without experience: the reverse of the micro-batch"
    order = BackwardOrder()
    play(order, one_forward_one_backward(3), 2)
    assert play(order, one_forward_one_backward(3), 2)[1] == (GroupKey(0, 0), keys((1, 1), (0, 1)))
    order = BackwardOrder()
    play(order, one_forward_one_backward(4), 1)
    # Micro-batch 2 has not run forward yet.
    assert play(order, one_forward_one_backward(4), 1)[0] == (GroupKey(0, 0), keys((0, 1)))


@pytest.mark.parametrize(("before", "schedule"), [
    *((one, one) for one in (one_after_the_other(3), one_forward_one_backward(5, 2), one_forward_one_backward(5, 4),
                             interleaved(4), interleaved(6))),
    *((one_forward_one_backward(4), one_forward_one_backward(number)) for number in (1, 2, 7)),
])  # fmt: skip
def test_what_was_seen_once_is_always_foretold(before: list[Step], schedule: list[Step]) -> None:
    """Also after a step of another number of micro-batches."""
    order = BackwardOrder()
    play(order, before, 3)
    play(order, schedule, 3)
    foretold = play(order, schedule, 3)
    num_blind = 0
    for (_, upcoming), (next_key, _) in itertools.pairwise(foretold):
        assert not upcoming or upcoming[0] == next_key
        num_blind += not upcoming  # what comes next has not run forward yet
    assert num_blind < len(foretold) / 2


def test_groups_begin_once_are_numbered_and_forgotten_with_their_graph() -> None:
    order = BackwardOrder()
    groups = [order.begin_forward(layer, at(2 - layer)) for layer in range(3)]
    groups[0].prefetched_bytes = 100
    assert order.begin_backward(groups[2])
    assert not order.begin_backward(groups[2])
    assert order.prefetched_bytes() == 100
    del groups
    assert order.prefetched_bytes() == 0
    assert list(order.upcoming()) == []
    first, second = order.begin_forward(0, at(2)), order.begin_forward(0, at(2))  # the layer runs twice
    assert (first.key, second.key) == (GroupKey(0, 0), GroupKey(0, 1))


def test_a_group_knows_its_handles_only_as_long_as_they_live() -> None:
    group, decision = BackwardOrder().begin_forward(0, at(0)), Decision(Action.SWAP, Reason.POLICY)
    handles = [Handle(Site(0, "a", i), group, torch.ones(4).untyped_storage(), None, None, decision) for i in range(3)]
    for handle in handles:
        group.add(handle)
    assert group.num_bytes == 48
    assert group.has(handles[1])
    assert [handle.site.ordinal for handle in group.in_backward_order()] == [2, 1, 0]
    del handles[1], handle
    assert [handle.site.ordinal for handle in group.in_backward_order()] == [2, 0]


def test_a_loop_that_always_has_a_graph_outstanding_adds_nothing_with_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.swap.engine.order.MAX_OBSERVED", 60)
    order = BackwardOrder()
    kept: list[list[Group]] = []
    for _ in range(40):  # 228 groups in one episode
        kept.append([order.begin_forward(layer, at(5 - layer)) for layer in range(6)])
        if len(kept) == 3:
            for group in reversed(kept.pop(0)):
                order.begin_backward(group)
                rest = [GroupKey(layer, group.key.micro_batch) for layer in reversed(range(group.key.layer))]
                assert [later.key for later in order.upcoming()] == rest
    assert sys.getsizeof(order._observed) <= 60 * 16 * 2
    kept.clear()
    play(order, one_forward_one_backward(3), 2)  # all graphs are gone: a new episode, which is learned
    assert play(order, one_forward_one_backward(3), 2)[1] == (GroupKey(0, 0), keys((1, 1), (0, 1)))
