"""The order of copies of optimizer state, on a device that runs each as late as the waits allow."""

from collections.abc import Iterator

import pytest
import torch

from megatron.swap.common.types import KIB, MIB
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.optimizer.param_state import MAIN, ParamShard
from megatron.swap.optimizer.state_memory import StateMemory
from megatron.swap.optimizer.transfers import Move, StateTransfers, as_bytes
from tests.lazy_device import LazyDevice, LazyStream


class Setup:
    """One shard of 0, 1, 2 … in host memory."""

    def __init__(self) -> None:
        self.device = LazyDevice()
        self.arena = HostArena(limit_bytes=MIB, pinned=False, region_bytes=64 * KIB)
        self.transfers = StateTransfers(self.device, StateMemory(self.arena), 4 * KIB)
        self.shard = ParamShard(self.transfers.offload_main_param(torch.arange(256.0)), 0, 256)

    def load(self) -> tuple[Move, torch.Tensor]:
        """Return the move that offloads the shard again, and its values on the device."""
        self.bucket = self.transfers.load(self.transfers.begin_load([self.shard]))
        values = self.bucket.tensors[self.shard][MAIN]
        return Move(self.shard.span_of(self.shard.param_state.tensors[MAIN]), as_bytes(values)), values

    def in_host_memory(self) -> torch.Tensor:
        backing = self.shard.param_state.tensors[MAIN].backing
        assert isinstance(backing, torch.Tensor)
        return backing.view(torch.float32)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.device.close()
    setup.arena.close()


def test_a_load_waits_for_compute_which_may_still_use_the_memory_of_the_buffer(setup: Setup) -> None:
    ran: list[str] = []
    setup.device.compute = LazyStream("compute")
    setup.device.compute.enqueue(lambda: ran.append("earlier work"))
    setup.load()
    setup.bucket.event.synchronize()
    assert ran == ["earlier work"]


def test_the_memory_of_a_dropped_load_is_free_once_nothing_writes_there(setup: Setup) -> None:
    _, values = setup.load()
    setup.transfers.discard(setup.bucket)
    setup.device.synchronize()
    assert values.isnan().all()


def test_an_offload_waits_for_the_step_that_writes_its_source(setup: Setup) -> None:
    move, values = setup.load()
    setup.transfers.wait_for(setup.bucket)
    setup.device.compute = LazyStream("compute")
    setup.device.compute.enqueue(lambda: values.fill_(7))
    setup.transfers.offload([move], setup.bucket)
    setup.device.synchronize()
    assert (setup.in_host_memory() == 7).all()


def test_a_load_waits_for_the_last_offload_of_its_shards(setup: Setup) -> None:
    move, values = setup.load()
    setup.transfers.wait_for(setup.bucket)
    assert torch.equal(values, torch.arange(256.0))
    values.fill_(7)
    setup.transfers.offload([move], setup.bucket)
    _, again = setup.load()
    setup.transfers.wait_for(setup.bucket)
    assert (again == 7).all()


def test_after_synchronize_host_memory_holds_the_last_step(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.device, "discard", lambda _: None)  # it poisons before the copy that compute awaits
    move, values = setup.load()
    setup.transfers.wait_for(setup.bucket)
    values.fill_(7)
    setup.device.compute = LazyStream("compute")
    setup.transfers.offload([move], setup.bucket)
    setup.transfers.synchronize()
    assert (setup.in_host_memory() == 7).all()
