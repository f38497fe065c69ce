"""Link benchmark: which copies run, in which order, and that memory is freed; never how fast it was."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from megatron.swap.common.types import MIB, SwapError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.planner.profile import Link
from megatron.swap.profiling import link_benchmark
from megatron.swap.profiling.link_benchmark import NUM_COPIES, REPETITIONS, measure_link

ROOT = Path(__file__).resolve().parents[3]
NUM_BYTES = 3 * MIB


class CountedDevice(EmulatedDevice):
    """Notes the direction and the bytes of every copy; ``fail_at``: the number of the copy that fails, from 1."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(longest_delay_s=0.001)
        self.copies: list[tuple[str, int]] = []
        self._fail_at = fail_at

    def copy(self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self.copies.append((stream.direction, sum(source.numel() for source in sources)))
        if len(self.copies) == self._fail_at:
            raise MemoryError("planted")
        super().copy(stream, targets, sources)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(limit=8 * MIB, slab_bytes=2 * MIB, pinned=False, poison=True)
    yield made
    made.close()  # raises while anything is leased


def test_every_pattern_moves_its_bytes_and_everything_is_given_back(pool: HostPool) -> None:
    device = CountedDevice()
    link = measure_link(device, HostTier(pool), NUM_BYTES)
    out, back = NUM_COPIES * [("DtoH", NUM_BYTES)], NUM_COPIES * [("HtoD", NUM_BYTES)]
    first_use = out + back
    assert device.copies == first_use + REPETITIONS * out + REPETITIONS * back + REPETITIONS * (out + back)
    assert all(speed > 0 for speed in vars(link).values())
    assert pool.stats.leased_bytes == 0
    assert pool.stats.reserved_bytes <= 8 * MIB
    device.close()


def test_the_figures_are_bytes_by_the_median_of_times(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds_of: dict[tuple[str, ...], list[float]] = {
        ("out",): [5.0, 1.0, 2.0], ("in",): [4.0, 4.0, 9.0], ("out", "in"): [16.0, 1.0, 8.0],
    }  # fmt: skip
    left = {directions: iter(times) for directions, times in seconds_of.items()}

    def seconds(self: Any, directions: tuple[str, ...]) -> dict[str, float]:
        took = next(left[directions])
        return {direction: took * (1 if direction == "out" else 2) for direction in directions}

    monkeypatch.setattr(link_benchmark._Ends, "take", lambda self: None)
    monkeypatch.setattr(link_benchmark._Ends, "seconds", seconds)
    link = measure_link(EmulatedDevice(), HostTier(pool), 10**9 // NUM_COPIES)
    medians = [median(times) for times in seconds_of.values()]
    assert link == Link(1 / medians[0], 1 / (2 * medians[1]), 1 / medians[2], 1 / (2 * medians[2]))


@pytest.mark.parametrize("fail_at", [1, 5])
def test_a_copy_that_fails_leaves_nothing_leased(pool: HostPool, fail_at: int) -> None:
    device = CountedDevice(fail_at)
    with pytest.raises(SwapError, match="the link was not measured: planted"):
        measure_link(device, HostTier(pool), NUM_BYTES)
    assert pool.stats.leased_bytes == 0
    device.close()


TWO_RANKS = """
import os, sys
import torch
from megatron.swap.profiling.link_benchmark import measure_link, slowest_link
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.planner.profile import Link
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.common.types import MIB, SwapError

rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
device = EmulatedDevice(0.001, rank)
print(slowest_link(device, Link(*(4.0, 2.0, 5.0, 1.0) if rank else (1.0, 3.0, 5.0, 7.0))))
pool = HostPool(limit=(1 if rank else 8) * MIB, slab_bytes=MIB, pinned=False)
try:
    measure_link(device, HostTier(pool), 2 * MIB)
except SwapError as error:
    print(error)
assert pool.stats.leased_bytes == 0
device.close()
torch.distributed.barrier()  # passes only if the ranks are in step
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may end the process otherwise
"""


@pytest.mark.slow
def test_two_ranks_agree_on_the_slowest_link_and_give_up_together(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path / "store")],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, why in zip(ranks, ("copies failed on another rank", "the host pool cannot provide"), strict=True):
            output, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
            assert output.startswith(f"{Link(1.0, 2.0, 5.0, 1.0)}\nthe link was not measured: {why}")
    finally:
        for rank in ranks:
            rank.kill()
