"""The manager: lifetimes, exceptions, windows, leases, and cleanup at the end."""

import copy

import pytest
import torch
from torch import nn

from megatron.swap.common.types import MIB, Site, SwapError, layer_positions
from megatron.swap.engine.checksum import VerifyError
from megatron.swap.engine.decider import MAX_REFUSALS
from megatron.swap.engine.handle import Group, Handle, StorageState
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
    compare,
    forward,
    loss_of,
    one_after_the_other,
    one_step,
    result,
    save,
    stack,
    train_step,
)
from tests.lazy_device import LazyDevice

SITE = Site(0, "mlp", 0)
FIRST, SECOND, LAST = layer_positions([True, True, False], ends_in_loss=True)
KEPT, OFFLOADED = StorageState.KEPT, StorageState.OFFLOADED


def numbers() -> torch.Tensor:
    return torch.arange(4096.0)


class Bare:
    """A manager without layers. The test plays autograd."""

    def __init__(self, device: LazyDevice | None = None) -> None:
        self.device = device or LazyDevice()
        self.pool = HostPool(limit=MIB, slab_bytes=MIB, pinned=False, poison=True)
        self.manager = SwapManager(self.device, HostTier(self.pool), EVERYTHING, EngineSettings(window_bytes=0))

    def swap_out(self, *tensors: torch.Tensor, layer: int = 0) -> tuple[Handle, Group]:
        """Run a layer that saves these tensors. The caller's references are the only other ones."""
        group = self.manager.begin_forward(layer, FIRST)
        taken = [save(self.manager, tensor, SITE, group) for tensor in tensors]
        assert taken == [(taken[0][0], number) for number in range(len(tensors))], "all are views of one storage"
        self.manager.end_forward(group)
        return taken[0][0], group

    def go_on(self) -> None:
        """Run a layer at the very end that saves nothing, so that all pending storages are offloaded."""
        self.manager.end_forward(self.manager.begin_forward(2, LAST))

    def fetched(self, handle: Handle, group: Group, index: int = 0) -> torch.Tensor:
        return torch.empty(0).set_(self.manager.reload.fetch(handle, group, index), 0, (4096,), (1,))


class TestOneStorage:
    def test_its_way_out_and_back(self) -> None:
        bare = Bare()
        tensor = numbers()
        handle, group = bare.swap_out(tensor)
        assert handle.state is StorageState.OFFLOADING
        del tensor
        bare.go_on()
        assert (handle.state, handle.storage) == (OFFLOADED, None)
        assert torch.equal(bare.fetched(handle, group), numbers())
        assert (handle.state, handle.storage) == (OFFLOADED, None), "after the last unpack only its user keeps it"
        assert bare.pool.stats.num_leases == 1, "a second backward may come"
        del handle
        assert bare.pool.stats.num_leases == 0

    def test_views_share_one_handle_and_the_buffer_goes_at_the_last_unpack(self) -> None:
        bare = Bare()
        tensor = numbers()
        handle, group = bare.swap_out(tensor, tensor[7:], tensor.view(64, 64).t())
        del tensor
        bare.go_on()
        states = []
        for index in range(3):
            bare.manager.reload.fetch(handle, group, index)
            states.append(handle.state)
        assert states == [StorageState.RELOADED, StorageState.RELOADED, OFFLOADED]
        assert bare.device.num_copies == {"out": 1, "in": 1}

    def test_what_has_no_room_stays_if_someone_wants_to_know_and_goes_when_there_is_some(self) -> None:
        bare, told = Bare(), []
        kept = bare.pool.lease(MIB)
        with pytest.raises(HostMemoryError):
            bare.swap_out(numbers())
        bare.manager.offload._on_full = told.append
        for number in range(1, 2 + MAX_REFUSALS):
            handle, group = bare.swap_out(numbers())
            assert (handle.state, len(told)) == (KEPT, number)
            assert bare.manager.counters.layers[0].stayed_bytes == number * handle.num_bytes
            assert torch.equal(bare.fetched(handle, group), numbers())
        kept.free()
        handle, _ = bare.swap_out(numbers())
        bare.go_on()
        assert handle.state is OFFLOADED
        assert bare.device.num_copies == {"out": 1, "in": 0}

    def test_what_could_not_be_released_stays_until_the_policy_changes(self) -> None:
        bare, held = Bare(), [numbers() for _ in range(MAX_REFUSALS + 2)]
        for tensor in held[:-2]:
            bare.swap_out(tensor)
            bare.go_on()
            bare.go_on()
        group = bare.manager.begin_forward(0, FIRST)
        assert save(bare.manager, held[-2], SITE, group) is None
        bare.manager.end_forward(group)
        bare.manager.apply_policy(0)
        assert bare.swap_out(held[-1])[0].state is StorageState.OFFLOADING

    def test_an_output_that_the_next_layer_has_as_its_input_leaves_behind_that_one(self) -> None:
        bare = Bare()
        tensor, other = numbers(), torch.ones(4096)
        handle, _ = bare.swap_out(tensor)
        group = bare.manager.begin_forward(1, SECOND)
        save(bare.manager, tensor, Site(1, "mlp", 0), group)
        younger, _ = save(bare.manager, other, Site(1, "mlp", 1), group)
        bare.manager.end_forward(group)
        del tensor, other
        bare.go_on()
        assert [handle.state, younger.state] == [OFFLOADED, OFFLOADED]
        assert bare.device.num_copies["out"] == 2

    @pytest.mark.parametrize("comes_before", ["the commit", "the release", "the end of the run"])
    def test_backward_finds_on_the_device_what_is_not_released_yet(self, comes_before: str) -> None:
        bare, tensor = Bare(), numbers()
        if comes_before == "the commit":
            group = bare.manager.begin_forward(0, FIRST)
            handle, _ = save(bare.manager, tensor, SITE, group)
        else:
            handle, group = bare.swap_out(tensor)
        if comes_before == "the end of the run":
            bare.manager.drain()
        assert bare.fetched(handle, group).data_ptr() == tensor.data_ptr()
        bare.manager.end_forward(group)
        assert handle.state is KEPT
        assert bare.device.num_copies["in"] == 0
        assert bare.device.num_copies["out"] == 0 or comes_before != "the commit"

    def test_a_new_storage_at_the_address_of_one_that_left_gets_its_own_handle(self) -> None:
        bare = Bare(LazyDevice(poison=False))
        tensor = numbers()
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
        assert torch.equal(bare.fetched(handle, group), numbers())
        assert torch.equal(bare.fetched(new, new_group), torch.full((4096,), 5.0))

    def test_an_emptied_storage_is_left_to_its_owner_who_refills_it(self) -> None:
        bare = Bare()
        tensor = numbers()
        handle, group = bare.swap_out(tensor)
        tensor.untyped_storage().resize_(0)
        bare.go_on()
        assert handle.state is KEPT
        tensor.untyped_storage().resize_(4096 * 4)
        tensor.untyped_storage().copy_(numbers().untyped_storage())
        assert torch.equal(bare.fetched(handle, group), numbers())
        (empty := torch.ones(4096)).untyped_storage().resize_(0)
        save(bare.manager, empty, SITE, group := bare.manager.begin_forward(0, FIRST))
        bare.manager.end_forward(group)


def test_outputs_that_are_held() -> None:
    def run(layers: nn.ModuleList) -> Result:
        layers.zero_grad()
        outputs = [batch()]
        for layer in layers:
            outputs.append(layer(outputs[-1]))
        copies = [output.detach().clone() for output in outputs]
        (loss := loss_of(outputs[-1])).backward()
        assert all(map(torch.equal, outputs, copies))
        return result(layers, loss)

    compare(stack(6), run, 3, device=LazyDevice())


@pytest.mark.parametrize("ends_in_loss", [True, False])
def test_a_graph_thrown_away_gives_all_leases_back(ends_in_loss: bool) -> None:
    layers = stack(6)
    plain = one_step(copy.deepcopy(layers))
    with Engine(layers, device=LazyDevice(), ends_in_loss=ends_in_loss) as engine:
        train_step(layers, one_after_the_other(1))
        for _ in range(3):
            loss = loss_of(forward(layers, batch()))
            assert engine.num_leases > 0
            del loss
            # Copies under way may keep as much as the window until the next forward.
            left_bytes = engine.pool.stats.leased_bytes
            assert left_bytes == 0 if ends_in_loss else left_bytes <= 2 * engine.manager.release_budget.window_bytes
        assert one_step(layers).same_as(plain)
        assert engine.num_leases == 0
        assert not engine.device.violations


class Failing(Layer):
    fails = ""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.norm1(hidden_states))
        if self.fails == "in forward":
            fail()
        elif self.fails:
            hidden_states.register_hook(fail)
        return hidden_states + self.mlp(self.norm2(hidden_states))


def fail(*_: object) -> None:
    raise InterruptedError("the link is down")


def test_with_verify_a_slot_that_changed_in_the_tier_is_told_with_its_site() -> None:
    layers = stack(6)
    with Engine(layers, verify=True, device=LazyDevice()) as engine:
        one_step(layers)
        loss = loss_of(forward(layers, batch()))
        saved = next(one for one in engine.manager.offload._live.values() if one.slot is not None)
        saved.slot.views()[0][7] ^= 1
        with pytest.raises(VerifyError, match=str(saved.site)):
            loss.backward()
        del loss, saved
        train_step(layers, one_after_the_other(1))


class TestExceptions:
    @pytest.mark.parametrize("commit_bytes", [16 * MIB, 1])
    @pytest.mark.parametrize("where", ["in forward", "in backward"])
    def test_in_the_middle_of_a_pass_then_training_goes_on(self, where: str, commit_bytes: int) -> None:
        layers = stack(6, Failing)
        plain = one_step(copy.deepcopy(layers))
        with Engine(layers, device=LazyDevice(), commit_bytes=commit_bytes) as engine:
            for _ in range(3):
                layers[3].fails = where
                with pytest.raises(InterruptedError):
                    loss_of(forward(layers, batch())).backward()
                layers[3].fails = ""
                assert one_step(layers).same_as(plain)
                assert engine.num_leases == 0
            assert not engine.device.violations

    def test_a_failed_copy_is_raised_in_the_training_thread(self) -> None:
        layers = stack(6)
        engine = Engine(layers)
        train_step(layers, one_after_the_other(1))
        engine.manager.offload.lane.stream.enqueue(fail)
        with pytest.raises(SwapError, match="the link is down"):
            train_step(layers, one_after_the_other(1))
        engine.close()
