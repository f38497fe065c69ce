"""Handles: legal transitions, checks before release, and what a handle frees when it dies."""

import itertools
from collections import deque

import pytest
import torch

from megatron.swap.common.types import Action, GroupKey, Site, layer_positions
from megatron.swap.engine.decision import Decision, Reason
from megatron.swap.engine.handle import ALLOWED, Alias, ForwardPass, Group, Handle, StateError, StorageState


class FakeSlot:
    fence = 0

    def __init__(self) -> None:
        self.freed: list[int] = []

    def free(self, fence: int = 0) -> None:
        self.freed.append(fence)


def make(tensor: torch.Tensor, orphans: deque | None = None) -> Handle:
    group = Group(GroupKey(0, 0), layer_positions([True], ends_in_loss=True)[0], 0, ForwardPass())
    decision = Decision(Action.SWAP, Reason.POLICY)
    return Handle(Site(4, "mlp", 1), group, tensor.untyped_storage(), None, deque() if orphans is None else orphans,
                  decision)  # fmt: skip


def pack(handle: Handle, tensor: torch.Tensor) -> None:
    alias = tensor.detach()
    handle.aliases.append(Alias(alias, alias._version))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(StorageState, StorageState)))
def test_only_the_transitions_of_its_life_are_allowed(before: StorageState, after: StorageState) -> None:
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


def test_aliases_and_the_storage_object_are_ours_and_any_view_that_lives_is_held_elsewhere() -> None:
    tensor = torch.ones(8)
    handle = make(tensor)
    pack(handle, tensor)
    pack(handle, tensor.view(2, 4).t())
    view = tensor[3:]
    held = [handle.has_external_refs()]
    del tensor
    held.append(handle.has_external_refs())
    del view
    assert [*held, handle.has_external_refs()] == [True, True, False]


def test_a_change_of_any_view_or_of_the_size_shows_and_one_before_the_save_does_not() -> None:
    for change in (lambda tensor: tensor[2:].mul_(2), lambda tensor: tensor.untyped_storage().resize_(0)):
        tensor = torch.ones(8).add_(1)
        handle = make(tensor)
        pack(handle, tensor)
        assert not handle.changed()
        change(tensor)
        assert handle.changed()


def test_whether_a_change_of_another_tensor_of_the_storage_shows() -> None:
    tensor = torch.ones(8)
    handle = make(tensor)
    pack(handle, tensor)
    alias, = handle.aliases
    shares, other = tensor[2:], tensor.data
    assert (alias.counts_with(shares), alias.counts_with(other)) == (True, False)
    other.add_(1)
    assert not alias.counts_with(other), "nor once the counts differ"
    assert not handle.changed()


@pytest.mark.parametrize(("state", "event"), [
    (StorageState.RESIDENT, None), (StorageState.OFFLOADING, "out"), (StorageState.KEPT, "out"),
    (StorageState.OFFLOADED, None), (StorageState.RELOADING, "in"), (StorageState.RELOADED, None),
])  # fmt: skip
def test_a_storage_with_a_copy_under_way_outlives_its_handle(state: StorageState, event: str | None) -> None:
    orphans: deque = deque()
    handle = make(torch.ones(4), orphans)
    storage = handle.storage
    handle.state, handle.out_event, handle.in_event = state, "out", "in"
    del handle
    assert list(orphans) == ([] if event is None else [(storage, event)])


@pytest.mark.parametrize("frees", [True, False])
def test_a_slot_is_freed_once_with_the_last_read_as_fence(frees: bool) -> None:
    handle = make(torch.ones(4))
    slot = handle.slot = FakeSlot()
    handle.in_fence = 17
    for _ in range(2 * frees):
        handle.free_slot()
    del handle  # frees it too
    assert slot.freed == [17]
