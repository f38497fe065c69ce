"""Handles: legal transitions, checks before release, and what a handle frees when it dies."""

from __future__ import annotations

import itertools
from collections import deque

import pytest
import torch

from megatron.swap.common.types import Action, GroupKey, Site, layer_positions
from megatron.swap.engine.decision import Decision, Reason
from megatron.swap.engine.handle import ALLOWED, Alias, ForwardPass, Group, Handle, StateError, StorageState

OFFLOAD = Decision(Action.SWAP, Reason.POLICY)


class FakeSlot:
    fence = 0

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, fence: int = 0) -> None:
        self.freed.append(fence)


def make(tensor: torch.Tensor, orphans: deque | None = None) -> Handle:
    group = Group(GroupKey(0, 0), layer_positions([True], ends_in_loss=True)[0], 0, ForwardPass())
    orphans = deque() if orphans is None else orphans
    return Handle(Site(4, "mlp", 1), group, tensor.untyped_storage(), None, orphans, OFFLOAD)


def pack(handle: Handle, tensor: torch.Tensor) -> None:
    alias = tensor.detach()
    handle.aliases.append(Alias(alias, alias._version))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(StorageState, StorageState)))
def test_only_the_transitions_of_its_life_are_allowed(before: StorageState, after: StorageState):
    handle = make(torch.ones(4))
    handle.state = before
    if after in ALLOWED[before]:
        handle.move_to(after)
        assert handle.state is after
        return
    with pytest.raises(StateError) as error:
        handle.move_to(after)
    assert handle.state is before
    for word in ("layers.4/mlp/1", before.name, after.name, *(state.name for state in ALLOWED[before])):
        assert word in str(error.value)


def test_every_state_can_be_reached_and_only_stays_is_final():
    assert set(ALLOWED) == set(StorageState)
    assert set().union(*ALLOWED.values()) == set(StorageState) - {StorageState.RESIDENT}
    assert [state for state in StorageState if not ALLOWED[state]] == [StorageState.KEPT]


class TestHeldElsewhere:
    def test_aliases_and_the_storage_object_are_ours(self):
        tensor = torch.ones(8)
        handle = make(tensor)
        pack(handle, tensor)
        pack(handle, tensor.view(2, 4).t())
        assert handle.has_external_refs()
        del tensor
        assert not handle.has_external_refs()

    def test_any_view_that_lives_counts(self):
        tensor = torch.ones(8)
        handle = make(tensor)
        view = tensor[3:]
        del tensor
        assert handle.has_external_refs()
        del view
        assert not handle.has_external_refs()


class TestChanged:
    def test_an_in_place_change_of_any_view_shows(self):
        tensor = torch.ones(8)
        handle = make(tensor)
        pack(handle, tensor)
        assert not handle.changed()
        tensor[2:].mul_(2)
        assert handle.changed()

    def test_a_change_before_it_was_saved_does_not(self):
        tensor = torch.ones(8)
        tensor.add_(1)
        handle = make(tensor)
        pack(handle, tensor)
        assert not handle.changed()

    def test_emptied_and_refilled_to_another_size_shows(self):
        tensor = torch.ones(8)
        handle = make(tensor)
        tensor.untyped_storage().resize_(0)
        assert handle.changed()


def test_its_bytes_are_the_whole_storage_of_which_a_view_was_saved():
    tensor = torch.arange(6.0)
    handle = make(tensor[2:4])
    assert handle.num_bytes == 24
    assert torch.equal(handle.bytes_view().view(torch.float32), torch.arange(6.0))


class TestTheEnd:
    @pytest.mark.parametrize(
        ("state", "event"),
        [
            (StorageState.RESIDENT, None),
            (StorageState.OFFLOADING, "out"),
            (StorageState.KEPT, "out"),
            (StorageState.OFFLOADED, None),
            (StorageState.RELOADING, "in"),
            (StorageState.RELOADED, None),
        ],
    )
    def test_a_storage_with_a_copy_under_way_outlives_its_handle(self, state: StorageState, event: str | None):
        orphans: deque = deque()
        handle = make(torch.ones(4), orphans)
        storage = handle.storage
        handle.state, handle.out_event, handle.in_event = state, "out", "in"
        del handle
        if event is None:
            assert not orphans
        else:
            assert list(orphans) == [(storage, event)]

    def test_the_slot_is_freed_once_with_the_last_read_as_fence(self):
        handle = make(torch.ones(4))
        slot = handle.slot = FakeSlot()
        handle.in_fence = 17
        handle.free_slot()
        handle.free_slot()
        del handle
        assert slot.freed == [17]

    def test_a_handle_that_dies_frees_its_slot(self):
        handle = make(torch.ones(4))
        slot = handle.slot = FakeSlot()
        del handle
        assert slot.freed == [0]
