"""The budget of host memory: named reservations, refusals, and a pool that follows them."""

import pytest

from megatron.swap.common.types import MIB
from megatron.swap.memory.host_budget import HostMemoryBudget
from megatron.swap.memory.host_memory import HostMemoryError
from megatron.swap.memory.host_pool import HostPool


def test_reservations_and_what_is_left() -> None:
    budget = HostMemoryBudget(10 * MIB)
    state, guard = budget.reserve("optimizer state", 6 * MIB), budget.reserve("guard")
    assert (state.num_bytes, guard.num_bytes, budget.unreserved_bytes) == (6 * MIB, 0, 4 * MIB)
    state.resize(2 * MIB)
    guard.resize(8 * MIB)
    assert budget.unreserved_bytes == 0
    assert budget.holders() == "optimizer state 2.00 MiB, guard 8.00 MiB"
    guard.resize(0)
    assert (budget.unreserved_bytes, budget.holders()) == (8 * MIB, "optimizer state 2.00 MiB")


def test_a_refusal_names_who_has_how_much_and_changes_nothing() -> None:
    budget = HostMemoryBudget(10 * MIB)
    state = budget.reserve("optimizer state", 6 * MIB)
    message = r"buffers takes 5\.00 MiB of host memory, but 4\.00 MiB of 10 MiB are left .*optimizer state 6\.00 MiB\)"
    with pytest.raises(HostMemoryError, match=message):
        budget.reserve("disk buffers", 5 * MIB)
    assert (state.num_bytes, budget.unreserved_bytes) == (6 * MIB, 4 * MIB)
    budget.reserve("disk buffers", 4 * MIB)


def test_the_limit_of_a_pool_follows_the_reservations() -> None:
    budget = HostMemoryBudget(4 * MIB + 100)
    state = budget.reserve("optimizer state", 4 * MIB)
    pool = HostPool(limit=budget, slab_bytes=MIB, pinned=False)
    assert pool.limit_bytes == 0, "whole pages"
    with pytest.raises(HostMemoryError, match=r"limit is 0\.0 KiB \(reserved by others: optimizer state 4\.00 MiB\)"):
        pool.lease(1)
    state.resize(MIB)
    assert pool.limit_bytes == 3 * MIB
    leases = [pool.lease(MIB) for _ in range(3)]
    state.resize(2 * MIB + 1)
    assert pool.limit_bytes == 2 * MIB, "less than the pool has: it takes no more"
    leases.pop().free()
    pool.lease(MIB).free()
    with pytest.raises(HostMemoryError, match=r"3\.00 MiB reserved"):
        pool.reserve(3 * MIB + 1)
