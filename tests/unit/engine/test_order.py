"""The order of backward: guessed at first, learned afterwards, robust against every other order."""

from __future__ import annotations

import gc
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

OFFLOAD = Decision(Action.SWAP, Reason.POLICY)


def at(num_after: int) -> LayerPosition:
    """Return the position of a layer with so many layers after it."""
    return LayerPosition(num_after, 0, ends_in_loss=True)


Foretold = tuple[GroupKey, list[GroupKey]]
"""The group that began, and the groups predicted to follow."""


def play(order: BackwardOrder, schedule: Sequence[Step], layers_per_chunk: int, foretold: list[Foretold]) -> None:
    """Play forward and backward of one step. Append the prediction at every group that begins to ``foretold``."""
    groups: dict[tuple[int, int], list[Group]] = {}
    for what, chunk, mb in schedule:
        if what == "F":
            first = chunk * layers_per_chunk
            groups[chunk, mb] = [
                order.begin_forward(first + i, at(layers_per_chunk - 1 - i)) for i in range(layers_per_chunk)
            ]
        else:
            for group in reversed(groups.pop((chunk, mb))):
                assert order.begin_backward(group)
                foretold.append((group.key, [later.key for later in order.upcoming()]))


def test_without_experience_the_reverse_of_the_micro_batch_is_foretold():
    order = BackwardOrder()
    foretold: list[Foretold] = []
    play(order, one_forward_one_backward(2), 3, foretold)
    assert foretold[0] == (GroupKey(2, 0), [GroupKey(1, 0), GroupKey(0, 0)])
    assert foretold[2] == (GroupKey(0, 0), [])
    assert foretold[3] == (GroupKey(2, 1), [GroupKey(1, 1), GroupKey(0, 1)])


@pytest.mark.parametrize(
    "schedule",
    [
        one_after_the_other(3),
        one_forward_one_backward(5, 2),
        one_forward_one_backward(5, 4),
        interleaved(4),
        interleaved(6),
    ],
)
def test_from_the_second_step_on_the_next_group_is_always_foretold(schedule: list[Step]):
    order = BackwardOrder()
    play(order, schedule, 3, [])
    foretold: list[Foretold] = []
    play(order, schedule, 3, foretold)
    num_blind = 0
    for (_, upcoming), (next_key, _) in itertools.pairwise(foretold):
        if upcoming:
            assert upcoming[0] == next_key
        else:
            num_blind += 1  # what comes next has not run forward yet
    assert num_blind < len(foretold) / 2


def test_prefetch_crosses_micro_batches_once_learned():
    order = BackwardOrder()
    play(order, one_forward_one_backward(3), 2, [])
    foretold: list[Foretold] = []
    play(order, one_forward_one_backward(3), 2, foretold)
    assert foretold[1] == (GroupKey(0, 0), [GroupKey(1, 1), GroupKey(0, 1)])


def test_nothing_is_foretold_past_a_forward_that_is_still_to_come():
    order = BackwardOrder()
    play(order, one_forward_one_backward(4), 1, [])
    foretold: list[Foretold] = []
    play(order, one_forward_one_backward(4), 1, foretold)
    assert foretold[0] == (GroupKey(0, 0), [GroupKey(0, 1)])  # micro-batch 2 has not run forward yet


@pytest.mark.parametrize("num_later", [1, 2, 7])
def test_another_number_of_micro_batches_is_survived_and_learned(num_later: int):
    order = BackwardOrder()
    play(order, one_forward_one_backward(4), 2, [])
    play(order, one_forward_one_backward(num_later), 2, [])
    foretold: list[Foretold] = []
    play(order, one_forward_one_backward(num_later), 2, foretold)
    for (_, upcoming), (next_key, _) in itertools.pairwise(foretold):
        assert not upcoming or upcoming[0] == next_key


def test_a_group_begins_its_backward_once():
    order = BackwardOrder()
    group = order.begin_forward(0, at(0))
    assert order.begin_backward(group)
    assert not order.begin_backward(group)


def test_a_group_whose_graph_was_thrown_away_is_forgotten():
    order = BackwardOrder()
    groups = [order.begin_forward(layer, at(2 - layer)) for layer in range(3)]
    groups[0].prefetched_bytes = 100
    order.begin_backward(groups[2])
    assert order.prefetched_bytes() == 100
    del groups
    assert order.prefetched_bytes() == 0
    assert list(order.upcoming()) == []
    assert order.begin_forward(0, at(2)).key == GroupKey(0, 0)


def test_a_layer_that_runs_twice_makes_two_groups():
    order = BackwardOrder()
    first, second = order.begin_forward(0, at(1)), order.begin_forward(0, at(1))
    assert (first.key, second.key) == (GroupKey(0, 0), GroupKey(0, 1))
    order.begin_backward(second)
    assert first.key != second.key


def test_a_group_knows_its_handles_only_as_long_as_they_live():
    group = BackwardOrder().begin_forward(0, at(0))
    handles = [Handle(Site(0, "a", i), group, torch.ones(4).untyped_storage(), None, None, OFFLOAD) for i in range(3)]
    for handle in handles:
        group.add(handle)
    assert group.num_bytes == 48
    assert group.has(handles[1])
    assert [handle.site.ordinal for handle in group.in_backward_order()] == [2, 1, 0]
    del handles[1], handle
    assert [handle.site.ordinal for handle in group.in_backward_order()] == [2, 0]


def test_memory_of_kept_layers_is_free_once_backward_is_through_with_them():
    order = BackwardOrder()
    groups = [order.begin_forward(layer, at(3 - layer)) for layer in range(4)]
    for group, kept_bytes in zip(groups, (0, 5, 7, 9), strict=True):
        group.kept_bytes = kept_bytes
    seen = []
    for group in reversed(groups):
        order.begin_backward(group)
        assert order.current is group
        seen.append(group.forward_pass.over_bytes)
    assert seen == [0, 9, 16, 21]
    assert order.begin_forward(0, at(3)).forward_pass.over_bytes == 0  # another forward's


def outstanding(order: BackwardOrder, num_steps: int, num_layers: int = 6, num_kept: int = 3) -> list[Foretold]:
    """Run a loop that keeps the graphs of ``num_kept`` steps, and runs backward through the oldest."""
    foretold: list[Foretold] = []
    kept: list[list[Group]] = []
    for _ in range(num_steps):
        kept.append([order.begin_forward(layer, at(num_layers - 1 - layer)) for layer in range(num_layers)])
        if len(kept) == num_kept:
            for group in reversed(kept.pop(0)):
                order.begin_backward(group)
                foretold.append((group.key, [later.key for later in order.upcoming()]))
    return foretold


def test_a_loop_that_always_has_a_graph_outstanding_adds_nothing_with_its_steps() -> None:
    """After 2,000 steps of six layers, the order held 11,988 keys."""
    order = BackwardOrder()
    outstanding(order, 300)
    gc.collect()
    num_objects = len(gc.get_objects())
    outstanding(order, 2000)
    gc.collect()
    assert len(gc.get_objects()) <= num_objects + 20


def test_an_endless_episode_is_bounded_and_the_next_one_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.swap.engine.order.MAX_OBSERVED", 60)
    order = BackwardOrder()
    sizes: list[int] = []
    for _ in range(40):
        outstanding(order, 10)
        sizes.append(sys.getsizeof(order._observed))
    assert max(sizes) <= 60 * 16 * 2
    play(order, one_forward_one_backward(3), 2, [])  # all graphs are gone: a new episode
    foretold: list[Foretold] = []
    play(order, one_forward_one_backward(3), 2, foretold)
    assert foretold[1] == (GroupKey(0, 0), [GroupKey(1, 1), GroupKey(0, 1)])


def test_in_such_a_loop_the_rest_of_the_graph_is_foretold() -> None:
    for key, upcoming in outstanding(BackwardOrder(), 20):
        assert upcoming == [GroupKey(layer, key.micro_batch) for layer in reversed(range(key.layer))]
