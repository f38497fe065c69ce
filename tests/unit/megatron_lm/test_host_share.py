"""Host memory of a rank: its share for each use, and refusals before the model is built."""

from __future__ import annotations

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


def test_nothing_swaps() -> None:
    assert share(1.0, swaps=False).limit_bytes == MIB


def test_without_a_disk_state_takes_what_activations_leave() -> None:
    assert HostShare(100 * MIB, 30 * MIB + 1, 0, 0).optimizer_bytes == 69 * MIB
    assert HostShare(100 * MIB, 0, 0, 0).optimizer_bytes == 100 * MIB


def test_with_a_disk_each_has_half_at_least() -> None:
    assert HostShare(100 * MIB, 80 * MIB, GIB, 10 * MIB).optimizer_bytes == 45 * MIB
    assert HostShare(100 * MIB, 20 * MIB, GIB, 10 * MIB).optimizer_bytes == 70 * MIB
    unknown = HostShare(100 * MIB, 0, GIB, 10 * MIB)  # the planner decides, say
    assert unknown.optimizer_bytes == 45 * MIB
    alone = HostShare(100 * MIB, 0, GIB, 0)
    assert alone.optimizer_bytes == 100 * MIB


def test_a_small_disk_leaves_state_as_much_room_as_none() -> None:
    for disk_bytes, expected_mib in ((1, 89), (20 * MIB, 70), (50 * MIB, 45)):
        assert HostShare(100 * MIB, 0, disk_bytes, 10 * MIB).optimizer_bytes // MIB == expected_mib


def test_buffers_before_a_disk_are_counted() -> None:
    found = share(1.0, policy="auto", disk_dir=".", optimizer=1.0)
    assert found.buffers_bytes == 7 * (64 * MIB + 64 * 1024)
    assert found.optimizer_bytes == (GIB - found.buffers_bytes) // 2
    assert share(1.0, policy="auto").buffers_bytes == 0


def test_a_guard_swaps_no_layers_so_it_needs_no_buffers() -> None:
    found = share(1.0, swaps=False, optimizer=1.0, oom_guard=True, disk_dir=".")
    assert (found.buffers_bytes, found.guard_bytes) == (0, GIB // 4)
    assert found.optimizer_bytes == GIB - found.guard_bytes
    assert share(1.0, swaps=False, oom_guard=True).guard_bytes == GIB // 4


@pytest.mark.parametrize(
    ("host_gib", "settings"),
    [
        (0.002, {"policy": "auto"}), (0.007, {"optimizer": 1.0}), (0.0105, {"policy": "auto", "optimizer": 1.0}),
        (0.028, {"policy": "auto", "optimizer": "auto"}),
    ],
)
def test_no_room_for_the_buffers(host_gib: float, settings: dict[str, object]) -> None:
    told = r"may be reserved \(--swap-host-gib .* buffers .* take .*: raise --swap-host-gib"
    with pytest.raises(HostMemoryError, match=told):
        share(host_gib, disk_dir=".", swaps="policy" in settings, **settings)


def test_room_for_the_buffers_and_little_more() -> None:
    for host_gib, optimizer in ((0.028, 1.0), (0.03, "auto")):
        share(host_gib, disk_dir=".", policy="auto", optimizer=optimizer)


def test_less_than_a_page() -> None:
    with pytest.raises(HostMemoryError, match="raise --swap-host-gib"):
        share(1e-6, policy="auto")


def test_activations_get_what_optimizer_state_leaves_once_it_is_built() -> None:
    config = Settings(
        host_gib=1.0, host_unchecked=True, optimizer=1.0, oom_guard=True
    )
    found = host_share(config, swaps=True)
    state = found.reserve_state(config)
    assert (state.num_bytes, state.budget.limit_bytes) == (GIB - GIB // 4, GIB)
    pool = HostPool(limit=state.budget, pinned=False)
    OomGuard(EmulatedDevice(), pool, own_host_bytes=found.guard_bytes)
    assert pool.limit_bytes == 0
    state.resize(200 * MIB)
    assert pool.limit_bytes == found.limit_bytes - 200 * MIB
