"""The slab pool under random traffic, compared with a naive model."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.swap.common.types import GIB, MIB
from megatron.swap.memory.host_memory import PAGE_BYTES, HostMemoryError
from megatron.swap.memory.host_pool import HostPool, Lease
from tests.sizes import sized
from tests.unit.memory.test_host_pool import free_blocks, make_pool


class Model:
    """A naive pool: a list of all leased ranges, and sums over it."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.peak_bytes = 0

    def leased_bytes(self) -> int:
        return sum(-(-lease.nbytes // PAGE_BYTES) * PAGE_BYTES for lease in self.leases.values())

    def check(self, pool: HostPool) -> None:
        stats = pool.stats
        self.peak_bytes = max(self.peak_bytes, self.leased_bytes())
        assert stats.leased_bytes == self.leased_bytes()
        assert stats.leased_peak_bytes == self.peak_bytes
        assert stats.num_leases == len(self.leases)
        assert stats.reserved_bytes == sum(slab.nbytes for slab in pool._slabs)
        assert stats.reserved_bytes <= 1.02 * self.peak_bytes + pool.slab_bytes
        assert stats.reserved_bytes <= pool.limit_bytes
        blocks = free_blocks(pool)
        # Free blocks and leases tile every slab: no overlap, no gap. No two free blocks touch.
        ranges = [(e.slab, e.offset, e.nbytes, False) for lease in self.leases.values() for e in lease.extents]
        ranges += [(e.slab, e.offset, e.nbytes, True) for e in blocks]
        place, last_free = (-1, 0), False
        for slab, offset, nbytes, is_free in sorted(ranges):
            assert offset % PAGE_BYTES == 0
            assert nbytes > 0
            assert nbytes % PAGE_BYTES == 0
            if slab != place[0]:
                assert place[0] < 0 or place[1] == pool._slabs[place[0]].nbytes
                assert (slab, offset) == (place[0] + 1, 0)
                last_free = False
            else:
                assert offset == place[1]
                assert not (last_free and is_free)
            place, last_free = (slab, offset + nbytes), is_free
        if ranges:
            assert place == (len(pool._slabs) - 1, pool._slabs[-1].nbytes)


SIZES = st.one_of(
    st.integers(1, 64 * 1024),
    st.sampled_from([2 * MIB, 128 * MIB, 344 * MIB, 688 * MIB]),  # log-sum-exp, hidden, activation, fc1
    st.integers(MIB, 700 * MIB),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("free_oldest_half"), st.just(0)),
    ),
    max_size=80,
)


@settings(max_examples=sized(50, 20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS, slab_mib=st.sampled_from([16, 100, 256, 1024]), limit_gib=st.sampled_from([1, 6, 64]))
def test_against_the_model(steps, slab_mib, limit_gib):
    pool = make_pool(limit=limit_gib * GIB, slab_bytes=slab_mib * MIB)
    model = Model()
    for number, (kind, value) in enumerate(steps):
        if kind == "lease":
            paged_bytes = -(-value // PAGE_BYTES) * PAGE_BYTES
            fits = model.leased_bytes() + paged_bytes <= pool.limit_bytes
            single = any(block.nbytes >= paged_bytes for block in free_blocks(pool))
            if not fits:
                with pytest.raises(HostMemoryError):
                    pool.lease(value)
            else:
                lease = pool.lease(value)
                model.leases[number] = lease
                assert sum(extent.nbytes for extent in lease.extents) == paged_bytes
                assert not single or len(lease.extents) == 1
                assert sum(view.numel() for view in lease.views()) == value
        elif model.leases and kind == "free":
            chosen = list(model.leases)[value % len(model.leases)]
            model.leases.pop(chosen).free(fence=value)
        else:
            for chosen in list(model.leases)[: len(model.leases) // 2]:
                model.leases.pop(chosen).free()
        model.check(pool)
    for lease in model.leases.values():
        lease.free()
    model.leases.clear()
    assert sorted((b.slab, b.offset, b.nbytes) for b in free_blocks(pool)) == [
        (index, 0, slab.nbytes) for index, slab in enumerate(pool._slabs)
    ]
    pool.close()
