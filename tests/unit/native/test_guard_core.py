"""The guard's native part alone: what it evicts, in which order, and which locks may wait."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from megatron.swap.common.types import MIB
from megatron.swap.native.guarding import Flag, GuardCore, Piece, native
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

SIZE = MIB
TWO_THREADS = """
import threading, time, torch
from megatron.swap.native.guarding import native

core, flags, storages = native().Guard(1 << 30), [], []
core.begin()
native().limit_ram(1 << 40)
for key in (1, 2):
    flags.append(native().Flag())
    storages.append(torch.ones(1 << 20, dtype=torch.uint8).untyped_storage())
    core.offer(key, storages[-1]._cdata, 1 << 20, 1, key, True, flags[-1].address, key)
values, made = [1] * (1 << 17), []
native().limit_ram(0)
waits = threading.Thread(target=lambda: made.append(torch.empty(1 << 20, dtype=torch.uint8)))
waits.start()
time.sleep(0.3)  # it waits for its flag by now, with the guard's lock
threading.Thread(target=lambda: [time.sleep(0.3), *(flag.raise_() for flag in flags)]).start()
made.append(torch.tensor(values))  # torch allocates for that with the interpreter's lock
waits.join()
native().unlimit_ram()
assert sorted(core.take_evicted()) == [1, 2]
"""


class Offers:
    """A guard and the storages that were offered to it. The n-th storage is filled with n."""

    def __init__(self, most_host_bytes: int = 1 << 30) -> None:
        native().limit_ram(1 << 40)
        self.core: GuardCore = native().Guard(most_host_bytes)
        self.core.begin()
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.flags: dict[int, Flag] = {}

    def add(
        self, next_use: int = 0, *, is_copied: bool = False, group: int | None = None, num_bytes: int = SIZE,
        raised: bool = True,
    ) -> int:  # fmt: skip
        key = len(self.storages) + 1
        self.storages[key] = torch.full((num_bytes,), key, dtype=torch.uint8).untyped_storage()
        self.flags[key] = native().Flag()
        if raised:
            self.flags[key].raise_()
        self.offer(key, next_use, is_copied, key if group is None else group)
        return key

    def offer(self, key: int, next_use: int, is_copied: bool, group: int) -> None:
        storage = self.storages[key]
        self.core.offer(key, storage._cdata, storage.nbytes(), 1, next_use, is_copied, self.flags[key].address, group)

    def taken_for(self, num_bytes: int = SIZE) -> list[int]:
        """Return what is evicted, in order, for an allocation of ``num_bytes`` when no memory is free."""
        native().limit_ram(0)
        torch.empty(num_bytes, dtype=torch.uint8)
        native().limit_ram(1 << 40)
        return self.core.take_evicted()


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    native().unlimit_ram()


@pytest.fixture
def offers() -> Iterator[Offers]:
    made = Offers()
    yield made
    made.core.end()


def bytes_of(pieces: list[Piece]) -> set[int]:
    return {byte for address, num_bytes in pieces for byte in set(ctypes.string_at(address, num_bytes))}


def test_what_has_its_bytes_on_the_host_goes_first_and_of_each_what_is_used_last(offers: Offers) -> None:
    kept = [offers.add(next_use) for next_use in (5, 9, 7)]
    copied = [offers.add(next_use, is_copied=True) for next_use in (1, 8)]
    assert [offers.taken_for() for _ in range(5)] == [[copied[1]], [copied[0]], [kept[1]], [kept[2]], [kept[0]]]
    with pytest.raises(torch.OutOfMemoryError, match="has nothing more to evict: 5 MiB of saved tensors are evicted"):
        offers.taken_for()
    for key in kept:
        pieces = offers.core.withdraw(key)
        assert pieces is not None
        assert bytes_of(pieces) == {key}
    assert [offers.core.withdraw(key) for key in copied] == [[], []]


def test_no_more_goes_than_is_asked_for_but_a_group_as_a_whole(offers: Offers) -> None:
    later = [offers.add(9, group=2) for _ in range(3)]
    sooner = [offers.add(1, group=1) for _ in range(3)]
    assert offers.taken_for(SIZE) == later
    assert offers.taken_for(2 * SIZE) == sooner
    rescues = offers.core.take_rescues()
    assert [(one.wanted_bytes, one.freed_bytes, one.copied_bytes, list(one.groups)) for one in rescues] == [
        (SIZE, 3 * SIZE, 3 * SIZE, [2]), (2 * SIZE, 3 * SIZE, 3 * SIZE, [1]),
    ]  # fmt: skip
    assert offers.core.take_rescues() == []


def test_what_others_refer_to_was_emptied_or_is_claimed_stays(offers: Offers) -> None:
    view, emptied, withdrawn, other = (offers.add(next_use) for next_use in (9, 8, 7, 1))
    held = torch.empty(0, dtype=torch.uint8).set_(offers.storages[view])
    offers.storages[emptied].resize_(0)
    assert offers.core.withdraw(withdrawn) is None
    assert offers.taken_for() == [other]
    assert held.unique().tolist() == [view]
    del held
    assert offers.taken_for() == [view]


def test_memory_that_is_not_the_allocators_stays(offers: Offers) -> None:
    """Releasing that memory would free nothing, and might run Python under the guard's lock."""
    foreign, buffer = offers.add(9), bytearray(b"x" * SIZE)
    offers.storages[foreign] = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    offers.core.withdraw(foreign)
    offers.offer(foreign, 9, False, foreign)
    other = offers.add(1)
    assert offers.taken_for() == [other]
    assert buffer == b"x" * SIZE


def test_a_storage_that_was_taken_refuses_access_instead_of_crashing(offers: Offers) -> None:
    key = offers.add()
    assert offers.taken_for() == [key]
    with pytest.raises(RuntimeError, match="out-of-memory guard evicted this saved tensor"):
        torch.empty(0, dtype=torch.uint8).set_(offers.storages[key], 0, (SIZE,)).sum()


def test_no_room_on_the_host_is_an_error_and_what_is_copied_or_smaller_still_goes(offers: Offers) -> None:
    offers.core.set_most_host_bytes(64 * MIB)
    offers.add(9, num_bytes=0)
    offers.add(8, num_bytes=65 * MIB)
    small = offers.add(1)
    assert offers.taken_for() == [small]
    offers.core.set_most_host_bytes(0)
    copied = offers.add(1, is_copied=True)
    assert offers.taken_for() == [copied]
    with pytest.raises(torch.OutOfMemoryError, match=r"are in use .* the host has no room"):
        offers.taken_for()


def test_only_the_guard_in_force_is_asked(offers: Offers) -> None:
    key = offers.add()
    second = native().Guard(1 << 30)
    assert native().is_any_guard_in_force()
    with pytest.raises(RuntimeError, match="another out-of-memory guard is at work in this process"):
        second.begin()
    second.end()  # which it never was
    offers.core.end()
    assert not native().is_any_guard_in_force()
    second.begin()
    with pytest.raises(torch.OutOfMemoryError):
        offers.taken_for()
    second.end()
    offers.core.begin()
    offers.core.begin()
    assert offers.taken_for() == [key]


def test_it_waits_for_the_storages_own_event_and_for_no_other(offers: Offers) -> None:
    offers.add(1, is_copied=True, raised=False)  # never
    last = offers.add(9, is_copied=True, raised=False)
    returned = threading.Event()
    taken: list[list[int]] = []
    thread = threading.Thread(target=lambda: (taken.append(offers.taken_for()), returned.set()))
    thread.start()
    assert not returned.wait(0.2)
    offers.flags[last].raise_()
    thread.join(60)
    assert taken == [[last]]


def test_who_waits_for_the_guard_lets_others_run_python() -> None:
    """Two threads deadlock otherwise: one has the guard's lock and waits for Python's, the other one the reverse."""
    subprocess.run([sys.executable, "-c", TWO_THREADS], check=True, timeout=120)
