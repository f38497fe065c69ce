"""Prefetch windows and the release budget: what is reloaded ahead of its use, and what may await its release."""

import pytest
import torch

from megatron.swap.common.types import KIB
from megatron.swap.engine.reload import Reloader
from tests.engine import Engine, batch, forward, loss_of, one_after_the_other, one_step, stack, train_step
from tests.lazy_device import LazyDevice

LARGEST_STORAGE = 4 * 64 * 32 * 4


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The bytes that are on the device ahead of their use, and those that backward has freed, at each prefetch."""
    seen: list[tuple[int, int]] = []
    prefetch = Reloader.prefetch

    def noting(reloader: Reloader) -> None:
        prefetch(reloader)
        order = reloader._state.order
        seen.append((order.prefetched_bytes(), order.current.forward_pass.over_bytes if order.current else 0))

    monkeypatch.setattr(Reloader, "prefetch", noting)
    return seen


@pytest.fixture(scope="module")
def group_bytes() -> int:
    layers = stack(2)
    with Engine(layers) as engine:
        train_step(layers, one_after_the_other(1))
        return engine.manager.release_budget.largest_group_bytes


@pytest.mark.parametrize("num_groups", [0, 1, 2, None])
def test_no_more_than_the_window_comes_ahead_of_its_use(ahead, group_bytes: int, num_groups: int | None) -> None:
    """A window of one byte takes one storage; the engine's own is the largest group."""
    layers = stack(8)
    window_bytes = None if num_groups is None else num_groups * group_bytes or 1
    with Engine(layers, range(7), device=LazyDevice(), window_bytes=window_bytes) as engine:
        for _ in range(3):
            one_step(layers)
        window_bytes = window_bytes or engine.manager.release_budget.largest_group_bytes
        assert 0 < max(there - freed for there, freed in ahead) <= max(window_bytes, LARGEST_STORAGE)
        assert engine.counters.num_late == 0 or num_groups == 0


@pytest.mark.parametrize("is_chosen", [True, False])
def test_of_what_backward_gives_back_a_chosen_window_takes_as_much_again(
    ahead, group_bytes: int, is_chosen: bool
) -> None:
    """The engine's own window takes all memory that backward frees."""
    layers = stack(8)
    with Engine(layers, range(3), device=LazyDevice(), window_bytes=group_bytes if is_chosen else None):
        for _ in range(3):
            one_step(layers)
    assert (max(there for there, _ in ahead) > 2 * group_bytes) is not is_chosen


@pytest.mark.parametrize("ends_in_loss", [True, False])
def test_what_may_await_its_release_at_the_end_of_a_forward(ends_in_loss: bool) -> None:
    """At the loss only the tail's input, which its layer still held; elsewhere at most the window."""
    layers, window_bytes = stack(6), None if ends_in_loss else 100 * KIB
    with Engine(layers, device=LazyDevice(), ends_in_loss=ends_in_loss, window_bytes=window_bytes) as engine:
        for _ in range(3):
            loss = loss_of(forward(layers, batch()))
            left_bytes = engine.manager._state.offloading.num_bytes
            # The last layer's own frame holds its storages until it is through: nothing of it can go before.
            most_bytes = max(100 * KIB, engine.manager.release_budget.largest_group_bytes)
            assert left_bytes <= batch().nbytes if ends_in_loss else 0 < left_bytes <= most_bytes
            loss.backward()


def test_a_storage_that_is_saved_several_times_takes_its_memory_once() -> None:
    """As an encoder's output that each layer of a decoder reads."""
    layers, saved = stack(6), torch.ones(64)
    with Engine(layers, range(3), device=LazyDevice()) as engine:
        train_step(layers, one_after_the_other(1))
        manager, budget = engine.manager, engine.manager.release_budget
        for _ in range(2):  # in two forwards: what the first claimed says nothing of the second
            group = manager.begin_forward(4, engine.position(4))
            lent_bytes = budget._unaccounted_bytes
            assert lent_bytes == budget._kept_bytes[4] > 0
            for view in (saved, saved[3:], saved):
                manager.offload.account_kept(view.untyped_storage(), group)
            assert budget._unaccounted_bytes == lent_bytes - saved.nbytes
            assert group.kept_bytes == saved.nbytes
        kept, dropped = [], []
        for layer in (3, 4, 5):
            group = manager.begin_forward(layer, engine.position(layer))
            manager.offload.account_kept(saved.untyped_storage(), group)
            kept.append(group.kept_bytes)
            manager.offload.account_kept(torch.ones(4096).untyped_storage(), group)  # its address is used again
            dropped.append(group.kept_bytes - kept[-1])
            manager.end_forward(group)
        assert (kept, dropped) == ([saved.nbytes, 0, 0], 3 * [4 * 4096])
