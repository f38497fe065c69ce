"""Host memory for optimizer state: pieces in mappings that small ones share, up to a limit."""

from __future__ import annotations

import random

import pytest

from megatron.swap.common.types import KIB, MIB
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.memory.host_memory import HostMemoryError
from tests.sizes import sized


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
        assert arena.reserved_bytes == MIB
        arena.take(15 * KIB)
        arena.take(36 * KIB)
        assert arena.reserved_bytes == MIB + 52 * KIB, "near the limit no more than is needed: others may want the rest"

    @pytest.mark.parametrize("seed", range(sized(20)))
    def test_what_fits_can_be_taken_and_no_more(self, seed: int) -> None:
        numbers = random.Random(seed)
        sizes = [numbers.choice([1, 3000, 5000, 14_000, 17_000, 66_000]) for _ in range(200)]
        arenas = [HostArena(limit_bytes=2300 * KIB, pinned=False, region_bytes=MIB) for _ in range(2)]
        for arena in arenas:
            arena.take_all(sizes[:3])
        number = arenas[0].num_that_fit(sizes)
        assert 0 < number < len(sizes)
        arenas[0].take_all(sizes[:number])
        with pytest.raises(HostMemoryError):
            arenas[1].take_all(sizes[: number + 1])

    @pytest.mark.parametrize("seed", range(sized(60)))
    def test_what_is_sure_to_fit_fits(self, seed: int) -> None:
        """The guarantee counts what is left of shared mappings, what the last one leaves, and pages."""
        numbers = random.Random(seed)
        choice = [[16_000, 12_000], [1, 3000, 5000, 14_000, 17_000, 66_000], [1, 4097]][seed % 3]
        sizes = [numbers.choice(choice) for _ in range(1000)]
        limit_bytes = numbers.choice([300 * KIB, 2300 * KIB, 5 * MIB])
        arena = HostArena(limit_bytes=limit_bytes, pinned=False, region_bytes=MIB)
        arena.take(numbers.choice([1, 17_000, 100 * KIB]))
        left_bytes = limit_bytes - arena.reserved_bytes
        sure_bytes = arena.sure_bytes(len(sizes))
        taken_bytes = 0
        for size in [*sizes, *[17_000] * 1000]:
            if taken_bytes + size <= sure_bytes:
                taken_bytes += arena.take(size).numel()
        assert sure_bytes <= left_bytes

    @pytest.mark.parametrize("seed", range(20))
    def test_pieces_reserve_no_more_than_most_bytes(self, seed: int) -> None:
        numbers = random.Random(seed)
        sizes = [numbers.choice([1, 3000, 5000, 14_000, 15_900, 17_000, 66_000]) for _ in range(1000)]
        for limit_bytes in (10 * MIB, 100 * MIB):
            arena = HostArena(limit_bytes=limit_bytes, pinned=False, region_bytes=MIB)
            arena.take(17_000)
            number = arena.num_that_fit(sizes) * 3 // 4
            most_bytes, before_bytes = arena.most_bytes(sizes[:number]), arena.reserved_bytes
            for size in sizes[:number]:
                arena.take(size)
            assert arena.reserved_bytes - before_bytes <= most_bytes
            assert arena.most_bytes([]) == 0
            assert arena.most_bytes([MIB]) == min(MIB, limit_bytes - arena.reserved_bytes)

    def test_of_large_pieces_nearly_all_is_sure(self) -> None:
        arena = HostArena(limit_bytes=100 * MIB, pinned=False, region_bytes=MIB)
        assert 0.97 * 100 * MIB < arena.sure_bytes(100) < 98 * MIB
        arena.take(50 * MIB)
        assert arena.sure_bytes(100) < 49 * MIB
        assert arena.sure_bytes(10**6) == 0

    def test_a_piece_is_a_storage_of_its_own(self) -> None:
        """A checkpoint saves whole storages."""
        arena = HostArena(limit_bytes=MIB, pinned=False, region_bytes=64 * KIB)
        for num_bytes in (12, 70_000):
            assert arena.take(num_bytes).untyped_storage().nbytes() == num_bytes

    def test_what_is_taken_outlives_it(self) -> None:
        arena = HostArena(limit_bytes=MIB, pinned=False)
        piece = arena.take(10)
        piece.fill_(7)
        arena.close()
        assert piece.tolist() == [7] * 10

    @pytest.mark.gpu
    def test_dropped_without_close(self) -> None:
        """The next mappings get the same addresses, unless the registration keeps them."""
        for _ in range(5):
            arena = HostArena(limit_bytes=64 * MIB, pinned=True, region_bytes=MIB)
            pieces = arena.take_all([1, 3 * MIB, 16 * MIB])
            assert all(piece.is_pinned() for piece in pieces)
            del arena, pieces
