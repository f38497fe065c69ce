"""Host memory of the out-of-memory guard: how much it may map, and when evicted bytes make room again."""

from collections.abc import Iterable, Iterator

import pytest
import torch

from megatron.swap.common.types import MIB
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.oom_guard import OomGuard, RescuedBytes
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.native.guarding import Piece


class FakeCore:
    """A fake of the native core that evicts nothing."""

    def __init__(self) -> None:
        self.most_host_bytes = self.mapped = 0
        self.released: list[Piece] = []

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def pin(self) -> None: ...

    def set_most_host_bytes(self, num_bytes: int) -> None:
        self.most_host_bytes = num_bytes

    def mapped_bytes(self) -> int:
        return self.mapped

    def release(self, pieces: Iterable[Piece]) -> None:
        self.released += pieces


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(limit=16 * MIB, slab_bytes=MIB, pinned=False)
    yield pool
    pool.close()


def begun(pool: HostPool, own_host_bytes: int) -> tuple[OomGuard, FakeCore]:
    core, device = FakeCore(), EmulatedDevice()
    device.make_guard = lambda: core  # type: ignore[method-assign,assignment,return-value]
    guard = OomGuard(device, pool, own_host_bytes=own_host_bytes)
    guard.begin()
    return guard, core


@pytest.mark.parametrize("own_bytes", [0, 3 * MIB])
def test_guard_and_pool_together_stay_within_the_limit(own_bytes: int, pool: HostPool) -> None:
    pool.reserve(6 * MIB)
    guard, core = begun(pool, own_bytes)
    assert core.most_host_bytes == 10 * MIB
    pool.reserve(9 * MIB)
    guard.tidy(lambda fence: True)
    assert core.most_host_bytes == 7 * MIB
    core.mapped = 5 * MIB  # reserved before the pool can take it
    guard.tidy(lambda fence: True)
    assert pool.limit_bytes == 11 * MIB
    assert core.most_host_bytes + pool.stats.reserved_bytes == 16 * MIB


def test_evicted_bytes_make_room_only_behind_their_last_read(pool: HostPool) -> None:
    guard, core = begun(pool, 0)
    host = torch.zeros(8192, dtype=torch.uint8)
    address = host.data_ptr()
    first, second = (address, 4096), (address + 4096, 4096)
    for fence, piece in ((3, first), (4, second)):
        RescuedBytes([piece], guard._freed).free(fence)
    guard.tidy(lambda fence: fence < 3)
    assert core.released == []
    guard.tidy(lambda fence: fence <= 3)
    assert core.released == [first]
    guard.tidy(lambda fence: True)
    assert core.released == [first, second]
