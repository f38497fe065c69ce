"""Prefetch windows and the release budget: what is reloaded ahead of its use, and what may await its release."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.swap.common.types import KIB
from megatron.swap.engine.handle import Group
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.reload import Reloader
from tests.engine import Engine, batch, forward, loss_of, one_after_the_other, stack, train_step
from tests.lazy_device import LazyDevice


class TestWindow:
    @staticmethod
    def bytes_ahead(window_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Engine, Callable]:
        layers = stack(8)
        engine = Engine(layers, device=LazyDevice(), window_bytes=window_bytes, swapped=range(7))
        seen: list[int] = []
        prefetch = Reloader.prefetch

        def noting(self: Reloader) -> None:
            prefetch(self)
            current = self._state.order.current
            lent_bytes = current.forward_pass.over_bytes if current else 0
            seen.append(self._state.order.prefetched_bytes() - lent_bytes)

        monkeypatch.setattr(Reloader, "prefetch", noting)
        return seen, engine, lambda: train_step(layers, one_after_the_other(2))

    @pytest.mark.parametrize("window", ["one storage", "one group", "two groups", "None"])
    def test_no_more_than_the_window_comes_ahead_of_its_use(self, window: str, monkeypatch: pytest.MonkeyPatch):
        layers = stack(2)
        with Engine(layers) as probe:
            train_step(layers, one_after_the_other(1))
            group_bytes = probe.manager.release_budget.largest_group_bytes
        largest_storage = 4 * 64 * 32 * 4
        limits = {
            "one storage": 1,
            "one group": group_bytes,
            "two groups": 2 * group_bytes,
            "None": None,
        }
        seen, engine, step = self.bytes_ahead(limits[window], monkeypatch)
        for _ in range(3):
            step()
        window_bytes = limits[window] or engine.manager.release_budget.largest_group_bytes
        assert 0 < max(seen) <= max(window_bytes, largest_storage)
        assert engine.counters.num_late == 0 or window == "one storage"
        engine.close()

    @pytest.mark.parametrize("is_chosen", [True, False])
    def test_of_what_backward_gives_back_a_chosen_window_takes_as_much_again(
        self, is_chosen: bool, monkeypatch: pytest.MonkeyPatch
    ):
        """The engine's own window takes all memory that backward frees."""
        layers = stack(8)
        with Engine(layers, swapped=range(3)) as probe:
            train_step(layers, one_after_the_other(1))
            group_bytes = probe.manager.release_budget.largest_group_bytes
        seen: list[int] = []
        prefetch = Reloader.prefetch

        def noting(reloader: Reloader) -> None:
            prefetch(reloader)
            seen.append(reloader._state.order.prefetched_bytes())

        monkeypatch.setattr(Reloader, "prefetch", noting)
        window_bytes = group_bytes if is_chosen else None
        with Engine(layers, device=LazyDevice(), window_bytes=window_bytes, swapped=range(3)):
            for _ in range(3):
                train_step(layers, one_after_the_other(2))
        assert (max(seen) > 2 * group_bytes) is not is_chosen

    def test_another_policy_brings_its_window(self):
        layers = stack(4)
        with Engine(layers, device=LazyDevice()) as engine:
            budget = engine.manager.release_budget
            for window_bytes in (5 * KIB, None, 7 * KIB):
                train_step(layers, one_after_the_other(1))
                engine.manager.apply_policy(window_bytes)
                assert budget.window_bytes == (window_bytes or 0)  # nothing is known of sizes any more
            engine.manager.apply_policy(None)
            train_step(layers, one_after_the_other(1))
            assert budget.window_bytes == budget.largest_group_bytes > 7 * KIB

    def test_a_forward_that_ends_in_the_loss_leaves_nothing_waiting_for_release(self):
        layers = stack(6)
        with Engine(layers, device=LazyDevice()) as engine:
            for _ in range(3):
                loss = loss_of(forward(layers, batch()))
                # The tail's input may wait: its layer still held it.
                assert engine.manager._state.offloading.num_bytes <= batch().nbytes
                loss.backward()

    def test_a_forward_that_goes_on_elsewhere_leaves_at_most_the_window(self):
        layers = stack(6)
        with Engine(layers, device=LazyDevice(), ends_in_loss=False, window_bytes=100 * KIB) as engine:
            for _ in range(3):
                loss = loss_of(forward(layers, batch()))
                # The last layer's own frame holds its storages until it is through: nothing of it can go before.
                window_bytes = max(100 * KIB, engine.manager.release_budget.largest_group_bytes)
                assert 0 < engine.manager._state.offloading.num_bytes <= window_bytes
                loss.backward()

    @pytest.mark.parametrize("swapped", [range(3), range(6)], ids=["chosen", "tail"])
    def test_a_layer_that_stays_lends_what_it_has_not_claimed_yet(
        self, swapped: range, monkeypatch: pytest.MonkeyPatch
    ):
        in_flight: list[tuple[int, int]] = []
        account_kept = Offloader.account_kept

        def noting(self: Offloader, storage: torch.UntypedStorage, group: Group) -> None:
            queue = self._state.offloading
            before = queue.num_bytes
            account_kept(self, storage, group)
            if self._running is not None and self._running.position.num_after == 0:
                in_flight.append((before, queue.num_bytes))
                assert queue.num_bytes <= self._state.release_budget._unaccounted_bytes

        monkeypatch.setattr(Offloader, "account_kept", noting)
        layers = stack(6)
        with Engine(layers, swapped, device=LazyDevice()) as engine:
            for _ in range(2):  # the largest group is learned, so the tail; then what the tail keeps
                train_step(layers, one_after_the_other(1))
            in_flight.clear()
            loss = loss_of(forward(layers, batch()))
            assert in_flight[0][0] > 0.9 * engine.manager.release_budget.largest_group_bytes
            assert engine.manager._state.offloading.num_bytes == 0
            del loss

    def test_a_storage_that_a_staying_layer_saves_twice_claims_its_memory_once_and_anew_in_the_next(self):
        layers = stack(6)
        with Engine(layers, range(3), device=LazyDevice()) as engine:
            train_step(layers, one_after_the_other(1))
            manager, position = engine.manager, engine.position(4)
            saved = torch.ones(64)
            for _ in range(2):  # in two forwards: what the first claimed says nothing of the second
                group = manager.begin_forward(4, position)
                lent_bytes = manager.release_budget._unaccounted_bytes
                assert lent_bytes == manager.release_budget._kept_bytes[4] > 0
                for view in (saved, saved[3:], saved):
                    manager.offload.account_kept(view.untyped_storage(), group)
                assert manager.release_budget._unaccounted_bytes == lent_bytes - saved.nbytes
                assert group.kept_bytes == saved.nbytes

    def test_a_storage_that_several_layers_keep_is_slack_in_the_first_alone(self):
        """It takes its memory once, as an encoder's output that each layer of a decoder reads."""
        layers = stack(6)
        with Engine(layers, range(3), device=LazyDevice()) as engine:
            train_step(layers, one_after_the_other(1))
            manager, saved = engine.manager, torch.ones(64)
            kept, dropped = [], []
            for layer in (3, 4, 5):
                group = manager.begin_forward(layer, engine.position(layer))
                manager.offload.account_kept(saved.untyped_storage(), group)
                kept.append(group.kept_bytes)
                manager.offload.account_kept(torch.ones(4096).untyped_storage(), group)  # its address is used again
                dropped.append(group.kept_bytes - kept[-1])
                manager.end_forward(group)
            assert kept == [saved.nbytes, 0, 0]
            assert dropped == 3 * [4 * 4096]

    def test_a_huge_window_keeps_everything(self):
        layers = stack(4)
        with Engine(layers, window_bytes=1 << 40) as engine:
            train_step(layers, one_after_the_other(1))
            before = engine.counters.out_bytes
            train_step(layers, one_after_the_other(1))
            assert engine.counters.out_bytes == before
