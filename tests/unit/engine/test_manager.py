"""The manager: lifetimes, exceptions, windows, leases, and cleanup at the end."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from megatron.swap.common.types import KIB, MIB, Site, SwapError, layer_positions
from megatron.swap.engine.decider import MAX_REFUSALS
from megatron.swap.engine.handle import StorageState
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.settings import EngineSettings
from megatron.swap.memory.host_memory import HostMemoryError
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.host import HostTier
from tests.engine import (
    EVERYTHING,
    Engine,
    Layer,
    Result,
    batch,
    forward,
    loss_of,
    one_after_the_other,
    one_forward_one_backward,
    plain_and_swapped,
    save,
    stack,
    train_step,
)
from tests.lazy_device import LazyDevice

SITE = Site(0, "mlp", 0)
FIRST, SECOND, LAST = layer_positions([True, True, False], ends_in_loss=True)


class Bare:
    """A manager without layers. The test plays autograd."""

    def __init__(self, device: LazyDevice | None = None) -> None:
        self.device = device or LazyDevice()
        self.pool = HostPool(limit=MIB, slab_bytes=MIB, pinned=False, poison=True)
        self.manager = SwapManager(self.device, HostTier(self.pool), EVERYTHING, EngineSettings(window_bytes=0))

    def swap_out(self, tensor: torch.Tensor, layer: int = 0):
        """Run a layer that saves only ``tensor``. The caller's reference is the only other one."""
        group = self.manager.begin_forward(layer, FIRST)
        taken = save(self.manager, tensor, SITE, group)
        assert taken is not None
        self.manager.end_forward(group)
        return taken[0], group

    def go_on(self) -> None:
        """Run a layer at the very end that saves nothing, so that all pending storages are offloaded."""
        self.manager.end_forward(self.manager.begin_forward(2, LAST))


class TestOneStorage:
    def test_its_way_out_and_back(self):
        bare = Bare()
        tensor = torch.arange(4096.0)
        handle, group = bare.swap_out(tensor)
        assert handle.state is StorageState.OFFLOADING
        del tensor
        bare.go_on()
        assert handle.state is StorageState.OFFLOADED
        assert handle.storage is None
        storage = bare.manager.reload.fetch(handle, group, 0)
        assert torch.equal(torch.empty(0).set_(storage, 0, (4096,), (1,)), torch.arange(4096.0))
        assert handle.state is StorageState.OFFLOADED
        assert handle.storage is None, "after the last unpack only its user keeps it"
        assert bare.pool.stats.num_leases == 1, "a second backward may come"
        del handle
        assert bare.pool.stats.num_leases == 0

    def test_views_share_one_handle_and_the_buffer_goes_at_the_last_unpack(self):
        bare = Bare()
        tensor = torch.arange(4096.0)
        group = bare.manager.begin_forward(0, FIRST)
        taken = [save(bare.manager, view, SITE, group) for view in (tensor, tensor[7:], tensor.view(64, 64).t())]
        bare.manager.end_forward(group)
        handle = taken[0][0]
        assert all(other is handle for other, _ in taken)
        assert [index for _, index in taken] == [0, 1, 2]
        del tensor
        bare.go_on()
        states = []
        for index in range(3):
            bare.manager.reload.fetch(handle, group, index)
            states.append(handle.state)
        assert states == [StorageState.RELOADED, StorageState.RELOADED, StorageState.OFFLOADED]
        assert bare.device.num_copies == {"out": 1, "in": 1}

    def test_a_storage_held_by_others_stays_and_twice_held_is_no_longer_tried(self):
        bare = Bare()
        for _ in range(MAX_REFUSALS):
            tensor = torch.arange(4096.0)
            handle, _ = bare.swap_out(tensor)
            bare.go_on()
            assert handle.state is StorageState.OFFLOADING, "the next layer's caller may hold it, its input"
            bare.go_on()
            assert handle.state is StorageState.KEPT
            assert bare.pool.stats.num_leases == 0
            assert torch.equal(tensor, torch.arange(4096.0))
        group = bare.manager.begin_forward(0, FIRST)
        assert save(bare.manager, torch.arange(4096.0), SITE, group) is None

    def test_what_has_no_room_stays_if_someone_wants_to_know_and_goes_when_there_is_some(self):
        bare, told = Bare(), []
        kept = bare.pool.lease(MIB)
        with pytest.raises(HostMemoryError):
            bare.swap_out(torch.arange(4096.0))
        bare.manager.offload._on_full = told.append
        for number in range(1, 2 + MAX_REFUSALS):
            handle, group = bare.swap_out(torch.arange(4096.0))
            assert (handle.state, len(told)) == (StorageState.KEPT, number)
            assert bare.manager.counters.layers[0].stayed_bytes == number * handle.num_bytes
            storage = bare.manager.reload.fetch(handle, group, 0)
            assert torch.equal(torch.empty(0).set_(storage, 0, (4096,), (1,)), torch.arange(4096.0))
        kept.free()
        handle, _ = bare.swap_out(torch.arange(4096.0))
        bare.go_on()
        assert handle.state is StorageState.OFFLOADED
        assert bare.device.num_copies == {"out": 1, "in": 0}

    def test_what_is_smaller_may_still_have_room(self):
        bare, told = Bare(), []
        bare.manager.offload._on_full = told.append
        kept = bare.pool.lease(MIB - 16 * KIB)
        group = bare.manager.begin_forward(0, FIRST)
        sizes = [8192, 2048, 8192]
        taken = [save(bare.manager, torch.ones(size), Site(0, "mlp", i), group) for i, size in enumerate(sizes)]
        bare.manager.end_forward(group)
        bare.go_on()
        assert [handle.state for handle, _ in taken] == [StorageState.KEPT, StorageState.OFFLOADED, StorageState.KEPT]
        assert len(told) == 2
        kept.free()

    def test_an_output_that_the_next_layer_has_as_its_input_leaves_behind_that_one(self):
        bare = Bare()
        tensor, other = torch.arange(4096.0), torch.ones(4096)
        handle, _ = bare.swap_out(tensor)
        group = bare.manager.begin_forward(1, SECOND)
        save(bare.manager, tensor, Site(1, "mlp", 0), group)
        younger, _ = save(bare.manager, other, Site(1, "mlp", 1), group)
        bare.manager.end_forward(group)
        del tensor, other
        bare.go_on()
        assert [handle.state, younger.state] == [StorageState.OFFLOADED, StorageState.OFFLOADED]
        assert bare.device.num_copies["out"] == 2

    def test_backward_that_comes_before_the_release_finds_it_on_the_device(self):
        bare = Bare()
        tensor = torch.arange(4096.0)
        handle, group = bare.swap_out(tensor)
        assert bare.manager.reload.fetch(handle, group, 0).data_ptr() == tensor.data_ptr()
        assert handle.state is StorageState.KEPT
        assert bare.device.num_copies["in"] == 0

    def test_backward_that_comes_before_the_commit_copies_nothing(self):
        bare = Bare()
        group = bare.manager.begin_forward(0, FIRST)
        handle, index = save(bare.manager, torch.ones(4096), SITE, group)
        bare.manager.reload.fetch(handle, group, index)
        bare.manager.end_forward(group)
        assert handle.state is StorageState.KEPT
        assert bare.device.num_copies == {"out": 0, "in": 0}

    def test_a_new_storage_at_the_address_of_one_that_left_gets_its_own_handle(self):
        bare = Bare(LazyDevice(poison=False))
        tensor = torch.arange(4096.0)
        address = tensor.untyped_storage()._cdata
        handle, group = bare.swap_out(tensor)
        del tensor
        bare.go_on()
        bare.device.graveyard.clear()
        others: list[torch.Tensor] = []
        while not others or others[-1].untyped_storage()._cdata != address:
            others.append(torch.full((4096,), 5.0))
            assert len(others) < 100_000
        new, new_group = bare.swap_out(others.pop(), layer=1)
        assert new is not handle
        bare.go_on()
        for old, expected in ((handle, torch.arange(4096.0)), (new, torch.full((4096,), 5.0))):
            storage = bare.manager.reload.fetch(old, group if old is handle else new_group, 0)
            assert torch.equal(torch.empty(0).set_(storage, 0, (4096,), (1,)), expected)

    def test_an_emptied_storage_is_left_to_its_owner_who_refills_it(self):
        bare = Bare()
        tensor = torch.arange(4096.0)
        handle, group = bare.swap_out(tensor)
        tensor.untyped_storage().resize_(0)
        bare.go_on()
        assert handle.state is StorageState.KEPT
        tensor.untyped_storage().resize_(4096 * 4)
        tensor.untyped_storage().copy_(torch.arange(4096.0).untyped_storage())
        storage = bare.manager.reload.fetch(handle, group, 0)
        assert torch.equal(torch.empty(0).set_(storage, 0, (4096,), (1,)), torch.arange(4096.0))

    def test_a_storage_that_is_empty_when_it_is_saved_stays(self):
        bare = Bare()
        tensor = torch.ones(4096)
        tensor.untyped_storage().resize_(0)
        group = bare.manager.begin_forward(0, FIRST)
        save(bare.manager, tensor, SITE, group)
        bare.manager.end_forward(group)


class TestLifetimes:
    def test_a_storage_saved_by_two_layers_goes_once_and_comes_back_once(self):
        class Sharing(Layer):
            shared: dict = {}  # noqa: RUF012

            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                if "first" not in self.shared:
                    self.shared["first"] = hidden_states.sin()
                    return super().forward(hidden_states) * self.shared["first"]
                return super().forward(hidden_states) * self.shared.pop("first")

        plain, swapped = plain_and_swapped(
            stack(6, Sharing), lambda layers: train_step(layers, one_after_the_other(2)), device=LazyDevice()
        )
        assert swapped.same_as(plain)

    def test_what_others_hold_at_release_stays_readable(self):
        layers = stack(6)
        with Engine(layers, device=LazyDevice()):
            for _ in range(3):
                outputs = [batch()]
                for layer in layers:
                    outputs.append(layer(outputs[-1]))
                copies = [output.detach().clone() for output in outputs]
                loss_of(outputs[-1]).backward()
                assert all(torch.equal(a, b) for a, b in zip(outputs, copies, strict=True))

    def test_emptied_and_refilled_in_backward_as_selective_recomputation_does(self):
        class Discarding(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                middle = self.first(hidden_states)
                with torch.no_grad():
                    norm = middle.sin()
                norm.requires_grad_()
                output = self.second(norm)
                storage, num_bytes = norm.untyped_storage(), norm.untyped_storage().nbytes()
                storage.resize_(0)

                def refill(_: torch.Tensor) -> None:
                    storage.resize_(num_bytes)
                    with torch.no_grad():
                        storage.copy_(middle.sin().untyped_storage())

                output.register_hook(refill)
                return output + middle

        for commit_bytes in (16 * MIB, 1):
            plain, swapped = plain_and_swapped(
                stack(5, Discarding),
                lambda layers: train_step(layers, one_forward_one_backward(3)),
                device=LazyDevice(),
                commit_bytes=commit_bytes,
            )
            assert swapped.same_as(plain)

    @pytest.mark.parametrize(
        "ends_in_loss",
        [
            True,
            False,
        ],
    )
    def test_a_graph_thrown_away_gives_all_leases_back(self, ends_in_loss: bool):
        layers = stack(6)
        plain = train_step(copy.deepcopy(layers), one_after_the_other(2))
        with Engine(layers, device=LazyDevice(), ends_in_loss=ends_in_loss) as engine:
            train_step(layers, one_after_the_other(1))
            for _ in range(3):
                loss = loss_of(forward(layers, batch()))
                assert engine.num_leases > 0
                del loss
                # Copies under way may keep as much as the window until the next forward.
                left_bytes = engine.pool.stats.leased_bytes
                assert left_bytes == 0 if ends_in_loss else left_bytes <= 2 * engine.manager.release_budget.window_bytes
            assert train_step(layers, one_after_the_other(2)).same_as(plain)
            assert engine.num_leases == 0
            assert not engine.device.violations

    def test_after_a_graph_was_thrown_away_micro_batches_are_counted_anew(self):
        layers = stack(4)
        with Engine(layers, swapped=[1], device=LazyDevice()) as engine:
            for _ in range(3):
                loss = loss_of(forward(layers, batch()))
                del loss
            assert engine.manager.begin_forward(0, FIRST).key.micro_batch == 0

    def test_a_layer_whose_output_is_not_used(self):
        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            hidden = layers[0](batch())
            layers[1](hidden)
            kept = layers[2](hidden)  # no gradient comes here either, but somebody holds it
            loss = loss_of(forward(layers[3:], hidden))
            loss.backward()
            assert kept.isfinite().all()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        plain, swapped = plain_and_swapped(stack(6), run, device=LazyDevice())
        assert swapped.same_as(plain)

    def test_a_layer_that_runs_twice_in_a_forward(self):
        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            loss = loss_of(forward([*layers, *layers], batch()))
            loss.backward()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        for device in (None, LazyDevice()):
            plain, swapped = plain_and_swapped(stack(4), run, num_steps=3, device=device)
            assert swapped.same_as(plain)

    def test_a_layer_that_runs_itself(self):
        class Nested(Layer):
            def forward(self, hidden_states: torch.Tensor, depth: int = 1) -> torch.Tensor:
                hidden_states = super().forward(hidden_states)
                if depth:
                    hidden_states = self(hidden_states, depth - 1).sin()
                return super().forward(hidden_states)

        plain, swapped = plain_and_swapped(
            stack(4, Nested), lambda layers: train_step(layers, one_after_the_other(2)), device=LazyDevice()
        )
        assert swapped.same_as(plain)

    def test_a_skip_connection_around_layers_adds_its_gradients_in_the_plain_order(self):
        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            early = layers[0](batch())
            loss = loss_of(forward(layers[1:], early) * early)
            loss.backward()
            return Result([loss.detach()], [parameter.grad for parameter in layers.parameters()])

        plain, swapped = plain_and_swapped(stack(6), run)
        assert swapped.same_as(plain)


class TestExceptions:
    def test_in_the_middle_of_forward_then_training_goes_on(self):
        class Failing(Layer):
            fails = False

            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                hidden_states = hidden_states + self.attention(self.norm1(hidden_states))
                if self.fails:
                    raise InterruptedError
                return hidden_states + self.mlp(self.norm2(hidden_states))

        layers = stack(6, Failing)
        plain = train_step(copy.deepcopy(layers), one_after_the_other(2))
        for commit_bytes in (16 * MIB, 1):
            with Engine(layers, device=LazyDevice(), commit_bytes=commit_bytes) as engine:
                for _ in range(3):
                    layers[3].fails = True
                    with pytest.raises(InterruptedError):
                        forward(layers, batch())
                    layers[3].fails = False
                    assert train_step(layers, one_after_the_other(2)).same_as(plain)
                    assert engine.num_leases == 0
                assert not engine.device.violations

    def test_in_the_middle_of_backward_then_training_goes_on(self):
        layers = stack(6)
        plain = train_step(copy.deepcopy(layers), one_after_the_other(2))

        def stop(_: torch.Tensor) -> None:
            raise InterruptedError

        with Engine(layers, device=LazyDevice()) as engine:
            for _ in range(3):
                hidden = forward(layers[:3], batch())
                hidden.register_hook(stop)
                loss = loss_of(forward(layers[3:], hidden))
                with pytest.raises(InterruptedError):
                    loss.backward()
                del loss, hidden
                assert train_step(layers, one_after_the_other(2)).same_as(plain)
                assert engine.num_leases == 0
            assert not engine.device.violations

    @pytest.mark.parametrize("num_copies_before", [0, 40])
    def test_a_failed_copy_is_raised_in_the_training_thread(self, num_copies_before: int):
        layers = stack(6)
        engine = Engine(layers)
        if num_copies_before:
            train_step(layers, one_after_the_other(1))

        def fail() -> None:
            raise OSError("the link is down")

        engine.manager.offload.lane.stream.enqueue(fail)
        with pytest.raises(SwapError, match="the link is down"):
            train_step(layers, one_after_the_other(1))
        engine.close()

    def test_a_full_tier_is_told_and_training_goes_on_once_it_fits(self):
        layers = stack(6)
        plain = train_step(copy.deepcopy(layers), one_after_the_other(1))
        with Engine(layers, device=LazyDevice()) as engine:
            engine.pool.budget.reserve("others", engine.pool.limit_bytes - engine.pool.slab_bytes)
            taken = engine.pool.lease(engine.pool.slab_bytes - 64 * KIB)
            with pytest.raises(SwapError, match="--swap-host-gib"):
                train_step(layers, one_after_the_other(1))
            gc.collect()
            taken.free()
            assert train_step(layers, one_after_the_other(1)).same_as(plain)
            assert engine.num_leases == 0

    def test_after_drain_a_graph_has_what_is_on_the_device(self):
        bare = Bare()
        values = torch.arange(4096.0)
        handle, group = bare.swap_out(values)
        assert handle.state is StorageState.OFFLOADING
        bare.manager.drain()
        assert bare.manager.reload.fetch(handle, group, 0).data_ptr() == values.data_ptr()
        assert handle.state is StorageState.KEPT

    def test_drain_with_copies_under_way(self):
        layers = stack(6)
        engine = Engine(layers)
        loss = loss_of(forward(layers, batch()))
        engine.close()
        assert engine.pool.stats.leased_bytes == 0
        del loss
