"""The slab pool: accounting, splitting, lifetimes, threads."""

import weakref
from collections.abc import Callable

import pytest
import torch

from megatron.swap.common.types import MIB
from megatron.swap.memory import host_pool
from megatron.swap.memory.host_memory import PAGE_BYTES, HostMemoryError
from megatron.swap.memory.host_pool import Extent, HostPool, LeaseError


def make_pool(limit: int = 64 * MIB, slab_bytes: int = 16 * MIB, **options) -> HostPool:
    return HostPool(limit=limit, slab_bytes=slab_bytes, pinned=False, **options)


def free_blocks(pool: HostPool) -> list[Extent]:
    _ = pool.stats  # absorb what was freed
    return [Extent(slab, offset, nbytes) for nbytes, slab, offset in pool._free._sizes]


class TestLease:
    def test_best_fit(self):
        pool = make_pool()
        leases = [pool.lease(size * MIB) for size in (3, 1, 2, 1, 9)]
        leases[0].free()
        leases[2].free()
        assert pool.lease(2 * MIB).extents == (Extent(0, 4 * MIB, 2 * MIB),)
        with pytest.raises(LeaseError, match="freed already"):
            leases[2].views()
        with pytest.raises(LeaseError, match="freed twice"):
            leases[2].free()

    def test_no_extent_is_short_where_a_longer_one_can_give(self):
        """One of less than 4 MiB copies slowly."""
        pool = make_pool()
        leases = [pool.lease(size * MIB) for size in (9, 1, 5, 1)]
        leases[0].free()
        leases[2].free()
        assert sorted(one.nbytes for one in pool.lease(10 * MIB).extents) == [4 * MIB, 6 * MIB]


class TestLimit:
    def test_exhausted(self):
        pool = make_pool(limit=32 * MIB)
        held = pool.lease(20 * MIB)
        before = pool.stats
        with pytest.raises(HostMemoryError, match=r"13 MiB.*20 MiB are leased.*32 MiB reserved.*limit is 32 MiB"):
            pool.lease(13 * MIB)
        assert pool.stats == before
        pool.lease(12 * MIB)
        held.free()
        pool.lease(20 * MIB)


def test_a_lease_has_the_largest_fence_of_the_memory_it_takes():
    pool = make_pool(limit=16 * MIB)
    leases = [pool.lease(4 * MIB) for _ in range(4)]
    assert [lease.fence for lease in leases] == [0] * 4
    leases[0].free(fence=4)
    leases[2].free(fence=6)
    for _ in range(2):  # an owner who copied nothing hides no earlier reads
        split = pool.lease(8 * MIB)
        assert split.fence == 6
        split.free()
    leases[1].free(fence=9)
    leases[3].free(fence=3)
    assert pool.lease(MIB).fence == 9, "of joint blocks the largest"


def test_memory_without_owner_reads_as_nan():
    pool = make_pool(limit=16 * MIB, poison=True)
    lease = pool.lease(MIB)
    view = lease.views()[0].view(torch.bfloat16)
    assert view.isnan().all()  # nothing written yet
    view.fill_(1)
    lease.free()
    assert not view.isnan().any()  # taken back at the pool's next call only
    _ = pool.stats
    assert view.isnan().all()
    assert view.view(torch.float32).isnan().all()


class TestClose:
    def test_refused_while_leases_are_out(self):
        pool = make_pool()
        lease = pool.lease(MIB)
        with pytest.raises(LeaseError, match=r"1 leases \(1.00 MiB\)"):
            pool.close()
        lease.free()
        pool.close()
        pool.close()

    def test_closed_pool_refuses(self):
        pool = make_pool()
        lease = pool.lease(MIB)
        slab = weakref.ref(lease.views()[0].untyped_storage())
        pool.close(force=True)
        assert slab() is None, "a view that the pool keeps holds the memory"
        calls: list[Callable[[], object]] = [lambda: pool.lease(MIB), lambda: pool.reserve(MIB), lease.views]
        for call in calls:
            with pytest.raises(LeaseError, match="closed"):
                call()
        lease.free()  # a late finalizer is no error
        assert pool.stats.reserved_bytes == 0


class TestThreads:
    def test_a_finalizer_may_free_in_the_middle_of_a_lease(self, monkeypatch):
        """Free inside every call that the allocator makes while it holds the lock."""
        pool = make_pool(limit=256 * MIB)
        waiting = [pool.lease(MIB) for _ in range(64)]
        insert = host_pool.insort

        def insert_and_collect(*args) -> None:
            if waiting:
                waiting.pop().free()
            insert(*args)

        monkeypatch.setattr(host_pool, "insort", insert_and_collect)
        held = []
        for size in range(1, 30):
            held.append(pool.lease(size * PAGE_BYTES))
            if size % 3 == 0:
                held.pop(0).free()
        for lease in held + waiting:
            lease.free()
        waiting.clear()
        assert pool.stats.leased_bytes == 0
        assert all(block.nbytes == 16 * MIB for block in free_blocks(pool))


def test_room_is_what_can_be_leased() -> None:
    available = [10 * MIB]
    pool = HostPool(limit=4 * MIB, slab_bytes=MIB, pinned=False, available_bytes=lambda: available[0])
    assert pool.has_room(4 * MIB)
    assert not pool.has_room(4 * MIB + 1)
    lease = pool.lease(MIB + 1)
    assert pool.has_room(3 * MIB - 4096)
    assert not pool.has_room(3 * MIB - 4095)
    available[0] = 0
    assert pool.has_room(MIB - 4096)  # the rest of the second slab
    assert not pool.has_room(MIB - 4095)
    lease.free()
    assert pool.has_room(2 * MIB)
    pool.close()


def test_the_pool_does_not_grow_beyond_what_there_is_now():
    """Another process takes memory."""
    available = [64 * MIB]
    pool = make_pool(available_bytes=lambda: available[0])
    pool.lease(10 * MIB)
    available[0] = 20 * MIB
    with pytest.raises(HostMemoryError, match=r"20.* are available now, .* another process has taken them"):
        pool.lease(40 * MIB)
    assert pool.stats.reserved_bytes == 16 * MIB
    pool.lease(24 * MIB)  # what is free in its slab, and 18 MiB more: no whole slabs
    assert pool.stats.reserved_bytes == 34 * MIB
    pool.close(force=True)
