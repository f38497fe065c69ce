"""Host memory for optimizer state: pieces in mappings that small ones share, up to a limit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.swap.common.types import KIB, MIB
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.memory.host_memory import HostMemoryError
from tests.sizes import sized

PIECES = st.sampled_from([1, 3000, 4097, 5000, 12_000, 14_000, 16_000, 17_000, 66_000])
SIZES = st.lists(PIECES, min_size=1, max_size=400)


class TestArena:
    """Pieces below 16 KiB share mappings of 1 MiB."""

    def test_a_piece_is_contiguous_and_nobody_elses(self) -> None:
        arena = HostArena(limit_bytes=4 * MIB, pinned=False, region_bytes=MIB)
        pieces = [arena.take(num_bytes) for num_bytes in (1, 5000, 70_000, 64 * KIB, 3)]
        for number, piece in enumerate(pieces):
            assert piece.data_ptr() % 4096 == 0
            piece.fill_(number)
        for number, piece in enumerate(pieces):
            assert bool((piece == number).all())
        assert arena.reserved_bytes == MIB + 72 * KIB + 64 * KIB

    def test_the_limit(self) -> None:
        arena = HostArena(limit_bytes=2 * MIB + 64 * KIB, pinned=False, region_bytes=MIB)
        arena.take(1)
        with pytest.raises(HostMemoryError, match=r"1.00 MiB are reserved, the limit is 2.06 MiB"):
            arena.take(MIB + 77 * KIB)
        with pytest.raises(HostMemoryError, match=r"2.09 MiB more .* 1.00 MiB are reserved"):
            arena.take_all([MIB, *[15 * KIB] * 70])
        assert arena.reserved_bytes == MIB, "nothing was taken"
        arena.take_all([15 * KIB] * 63)
        assert arena.num_that_fit([12 * KIB, 16 * KIB, MIB + 48 * KIB]) == 3, "to the last byte"
        assert arena.reserved_bytes == MIB
        arena.take(15 * KIB)
        arena.take(36 * KIB)
        assert arena.reserved_bytes == MIB + 52 * KIB, "near the limit no more than is needed: others may want the rest"

    @settings(max_examples=sized(20, 10), deadline=None)
    @given(sizes=SIZES, limit_kib=st.sampled_from([300, 2300, 10_000]), first=st.sampled_from([1, 17_000, 100 * KIB]))
    def test_estimates_hold_for_pieces_of_any_size(self, sizes: list[int], limit_kib: int, first: int) -> None:
        """What fits can be taken and no more, at no more than it may reserve; what is sure to fit fits."""
        def made() -> HostArena:
            arena = HostArena(limit_bytes=limit_kib * KIB, pinned=False, region_bytes=MIB)
            arena.take(first)
            return arena

        arena, together, other, sure = (made() for _ in range(4))
        number, before_bytes = arena.num_that_fit(sizes), arena.reserved_bytes
        together.take_all(sizes[:number])
        if number < len(sizes):
            with pytest.raises(HostMemoryError):
                other.take_all(sizes[: number + 1])
        some = sizes[: number * 3 // 4]
        most_bytes = arena.most_bytes(some)
        for size in some:
            arena.take(size)
        assert arena.reserved_bytes - before_bytes <= most_bytes
        assert arena.most_bytes([]) == 0
        assert arena.most_bytes([MIB]) == min(MIB, limit_kib * KIB - arena.reserved_bytes)
        pieces = [*sizes, *[17_000] * 300]
        sure_bytes, taken_bytes = sure.sure_bytes(len(pieces)), 0
        assert sure_bytes <= limit_kib * KIB - sure.reserved_bytes
        for size in pieces:
            if taken_bytes + size <= sure_bytes:
                taken_bytes += sure.take(size).numel()

    def test_estimates_to_the_byte(self) -> None:
        arena = HostArena(limit_bytes=4 * MIB, pinned=False, region_bytes=MIB)
        assert arena.most_bytes([4096] * 63) == 64 * 4096 + MIB
        assert arena.sure_bytes(2) == 3 * MIB * 63 // 64 - 2 * 4096, "one shared mapping may be almost empty"
        arena.take_all([MIB] * 3)
        assert arena.sure_bytes(2) == MIB * 63 // 64 - 2 * 4096, "of the only one that is left nothing is lost"

    def test_a_piece_is_a_storage_of_its_own(self) -> None:
        """A checkpoint saves whole storages."""
        arena = HostArena(limit_bytes=MIB, pinned=False, region_bytes=64 * KIB)
        for num_bytes in (12, 70_000):
            assert arena.take(num_bytes).untyped_storage().nbytes() == num_bytes
