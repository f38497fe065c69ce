"""Host memory of a rank: its share for each use, and refusals before the model is built."""

import pytest

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, MIB
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.memory.host_memory import HostMemoryError
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.run.host_share import HostShare, host_share


def share(host_gib: float, *, swaps: bool = True, **settings: object) -> HostShare:
    given = Settings(host_gib=host_gib, host_unchecked=True, **settings)  # type: ignore[arg-type]
    return host_share(given, swaps)


@pytest.mark.parametrize(
    ("activation_mib", "disk_bytes", "buffers_mib", "state_mib"),
    [
        (30, 0, 0, 70),  # without a disk state takes what activations leave
        (80, GIB, 10, 45), (20, GIB, 10, 70), (0, GIB, 0, 100),  # with a disk each has half at least
        (0, 20 * MIB, 10, 70), (0, 50 * MIB, 10, 45),  # a small disk: as without one
    ],
)  # fmt: skip
def test_memory_of_state(activation_mib: int, disk_bytes: int, buffers_mib: int, state_mib: int) -> None:
    found = HostShare(100 * MIB, activation_mib * MIB, disk_bytes, buffers_mib * MIB)
    assert found.optimizer_bytes // MIB == state_mib


def test_buffers_and_the_guard_have_their_part() -> None:
    assert share(1.0, swaps=False).limit_bytes == MIB, "nothing swaps"
    found = share(1.0, policy="auto", disk_dir=".", optimizer=1.0)
    assert found.buffers_bytes == 7 * (64 * MIB + 64 * 1024)
    assert found.optimizer_bytes == (GIB - found.buffers_bytes) // 2
    assert share(1.0, policy="auto").buffers_bytes == 0
    found = share(1.0, swaps=False, optimizer=1.0, oom_guard=True, disk_dir=".")  # swaps no layers, needs no buffers
    assert (found.buffers_bytes, found.guard_bytes, found.optimizer_bytes) == (0, GIB // 4, GIB - GIB // 4)


@pytest.mark.parametrize(
    ("host_gib", "settings"),
    [(0.002, {"policy": "auto"}), (0.007, {"optimizer": 1.0}), (0.028, {"policy": "auto", "optimizer": "auto"})],
)
def test_no_room_for_the_buffers(host_gib: float, settings: dict[str, object]) -> None:
    told = r"may be reserved \(--swap-host-gib .* buffers .* take .*: raise --swap-host-gib"
    with pytest.raises(HostMemoryError, match=told):
        share(host_gib, disk_dir=".", swaps="policy" in settings, **settings)


def test_activations_get_what_optimizer_state_leaves_once_it_is_built() -> None:
    config = Settings(host_gib=1.0, host_unchecked=True, optimizer=1.0, oom_guard=True)
    found = host_share(config, swaps=True)
    state = found.reserve_state(config)
    assert (state.num_bytes, state.budget.limit_bytes) == (GIB - GIB // 4, GIB)
    pool = HostPool(limit=state.budget, pinned=False)
    OomGuard(EmulatedDevice(), pool, own_host_bytes=found.guard_bytes)
    assert pool.limit_bytes == 0
    state.resize(200 * MIB)
    assert pool.limit_bytes == found.limit_bytes - 200 * MIB
