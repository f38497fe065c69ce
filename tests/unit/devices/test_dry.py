"""The dry device: its clock, its memory, and the blocks of its allocator."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from itertools import accumulate, pairwise, product
from pathlib import Path

import pytest
import torch

from megatron.swap.common.types import GIB, MIB
from megatron.swap.devices.dry import DryDevice
from megatron.swap.devices.dry_allocator import NO_END, Block, DryAllocator
from tests.support import RESULTS


def test_requests_of_each_size_get_their_segments() -> None:
    for num_bytes, reserved in ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (33 * MIB, 34)):
        allocator = DryAllocator()
        allocator.allocate(num_bytes)
        assert allocator.reserved_bytes == reserved * MIB, num_bytes


def test_a_segment_that_expands_gives_back_whole_pages_and_fills_holes_first() -> None:
    allocator = DryAllocator(expandable=True)
    blocks = [allocator.allocate(size * MIB) for size in (30, 60, 30)]
    allocator.free(blocks[1])
    allocator.release_cached()  # of 30 to 90 MiB the pages from 40 to 80
    assert allocator.reserved_bytes == 80 * MIB
    before = allocator.allocate(10 * MIB)  # behind the hole, since before it there may be more
    assert before.address == 80 * MIB
    filling = allocator.allocate(50 * MIB)
    assert (filling.address, allocator.reserved_bytes) == (30 * MIB, 120 * MIB)
    allocator.allocate(10 * MIB)
    assert allocator.reserved_bytes == 140 * MIB


def requests(seed: int) -> list[tuple[str, int]]:
    """Return allocations, with their bytes, and frees, with the number of the allocation."""
    chosen, live, made = random.Random(seed), [], []
    for _ in range(400):
        if live and chosen.random() < 0.48:
            made.append(("free", live.pop(chosen.randrange(len(live)))))
        else:
            live.append(sum(kind == "allocate" for kind, _ in made))
            made.append(("allocate", int(2 ** chosen.uniform(8, 27))))
    return made


def reserved_after(made: list[tuple[str, int]], expandable: bool, capacity_bytes: int = NO_END) -> list[int]:
    allocator, blocks, reserved = DryAllocator(expandable, capacity_bytes), [], []
    for kind, number in made:
        if kind == "allocate":
            blocks.append(allocator.allocate(number))
        else:
            allocator.free(blocks[number])
        reserved.append(allocator.reserved_bytes)
    return reserved


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_tile_their_segments(seed: int, expandable: bool) -> None:
    made = requests(seed)
    held = set(range(sum(kind == "allocate" for kind, _ in made)))
    held -= {number for kind, number in made if kind == "free"}
    allocator, blocks = DryAllocator(expandable), []
    for kind, number in made:
        if kind == "allocate":
            blocks.append(allocator.allocate(number))
        else:
            allocator.free(blocks[number])
    free_bytes = sum(block.num_bytes for blocks in allocator._free for block in blocks)
    assert allocator.reserved_bytes == free_bytes + sum(blocks[number].num_bytes for number in held)


ON_GPU = """
import json, sys, torch
tensors, reserved = [], []
if sys.argv[1] != "all":  # the allocator's own limit: the driver takes some of what is free when others have the rest
    torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / torch.cuda.mem_get_info()[1])
for kind, number in json.load(sys.stdin):
    if kind == "allocate":
        tensors.append(torch.empty(number, dtype=torch.uint8, device="cuda"))
    else:
        tensors[number] = None
    reserved.append(torch.cuda.memory_reserved())
print(json.dumps(reserved))
"""


LIMITED = [(False, 1.1, 6), (False, 1.1, 8), (False, 1.2, 1), (True, 1.1, 5), (True, 1.1, 9), (True, 1.2, 18)]
"""Requests that a device of so much memory, over the most that is in use, can meet if it gives back what is free."""


@pytest.mark.gpu
@pytest.mark.parametrize(("expandable", "room", "seed"), [*product((False, True), (None,), range(3)), *LIMITED])
def test_it_reserves_what_pytorch_reserves(
    expandable: bool, room: float | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
    made = requests(seed)
    capacity_bytes = NO_END if room is None else int(room * most_in_use(made))
    command = [sys.executable, "-c", ON_GPU, "all" if room is None else str(capacity_bytes)]
    done = subprocess.run(command, input=json.dumps(made), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == reserved_after(made, expandable, capacity_bytes)


def most_in_use(made: list[tuple[str, int]]) -> int:
    sizes = [number for kind, number in made if kind == "allocate"]
    changes = (number if kind == "allocate" else -sizes[number] for kind, number in made)
    return max(accumulate(changes))


@pytest.mark.parametrize(("expandable", "room", "seed"), LIMITED)
def test_requests_that_a_full_device_meets(expandable: bool, room: float, seed: int) -> None:
    made = requests(seed)
    capacity_bytes = int(room * most_in_use(made))
    reserved = reserved_after(made, expandable, capacity_bytes)
    assert any(after < before for before, after in pairwise(reserved))
    assert max(reserved) <= capacity_bytes < max(reserved_after(made, expandable))


@pytest.mark.parametrize("expandable", [False, True])
def test_a_full_device_gets_back_what_is_free(expandable: bool) -> None:
    """Before more is reserved. Where all is in use, it reserves more than there is."""
    device = DryDevice("a GPU", expandable, capacity_bytes=100 * MIB)
    tensors = [device.allocate(size * MIB) for size in (40, 20, 40)]
    del tensors[::2]
    assert (device.reserved_bytes(), device.take_retries()) == (100 * MIB, 0)
    tensors.append(device.allocate(60 * MIB))  # the free blocks are too small
    assert (device.reserved_bytes(), device.take_retries()) == (80 * MIB, 1)
    tensors.append(device.allocate(60 * MIB))
    assert (device.reserved_bytes(), device.take_retries()) == (140 * MIB, 1)


RECORDED = sorted((RESULTS / "h200-allocator").glob("*.json.gz"))


@pytest.mark.parametrize("path", RECORDED, ids=[path.name.removesuffix(".json.gz") for path in RECORDED])
def test_it_places_each_block_where_a_gpu_has_placed_it(path: Path) -> None:
    """The events of whole runs. Segments that do not expand have addresses of CUDA's own."""
    run = json.loads(gzip.decompress(path.read_bytes()))
    expandable, codes = "expandable_segments:True" in run["command"], run["codes"]
    grows, shrinks = ({codes[f"segment_{one}"] for one in ways} for ways in (("map", "alloc"), ("unmap", "free")))
    allocator, reserved_bytes, before = DryAllocator(expandable), 0, -1
    blocks: dict[int, Block] = {}
    begins: dict[bool, int] = {}
    for action, num_bytes, address in zip(run["action"], run["size"], run["address"], strict=True):
        if action in grows:
            reserved_bytes += num_bytes
        elif action in shrinks:
            reserved_bytes -= num_bytes
            if before not in shrinks:
                allocator.release_cached()
        elif action == codes["alloc"]:
            block = blocks[address] = allocator.allocate(num_bytes)
            assert allocator.reserved_bytes == reserved_bytes
            if expandable:
                assert block.address == address - begins.setdefault(block.is_small, address - block.address)
        else:
            allocator.free(blocks.pop(address))
        before = action
    assert reserved_bytes > 20 * GIB


def test_the_clock_and_the_peak() -> None:
    device = DryDevice("a GPU")
    device.take(MIB)
    begin = device.mark()
    device.run(2.5)
    device.run(0.5, workspace_bytes=(2 * MIB, MIB))
    assert device.mark().elapsed_ms_since(begin) == 3.0
    assert device.take_peak() == (4 * MIB, MIB)
    assert device.take_peak() == (MIB, MIB)
    assert device.peak_bytes() == 4 * MIB


def test_operators_begin_once_the_host_has_launched_them() -> None:
    device = DryDevice("a GPU")
    begin = device.mark()
    device.run(1.0, host_ms=0.25)
    device.run(0.0, host_ms=3.0)  # launches nothing
    assert (device.mark().elapsed_ms_since(begin), device.host_ms()) == (1.25, 3.25)
    device.run(1.0, host_ms=0.5)
    device.run(1.0, host_ms=0.5)
    assert (device.mark().elapsed_ms_since(begin), device.host_ms()) == (5.75, 4.25)
    device.synchronize()
    assert device.host_ms() == 5.75


def test_a_storage_counts_once_until_its_last_tensor_is_gone() -> None:
    device = DryDevice("a GPU")
    tensor = torch.empty(1000, device="meta")
    view = tensor[10:].view(-1, 10)
    for one in (tensor, view):
        device.hold(one.untyped_storage())
    assert device.allocated_bytes() == 4096
    del tensor, one
    assert device.allocated_bytes() == 4096
    del view
    assert device.allocated_bytes() == 0
    assert device.reserved_bytes() == 2 * MIB


def test_copies_take_their_time_beside_operators() -> None:
    device = DryDevice("a GPU", link_gb_s=50.0, link_both_gb_s=25.0)
    out, back = device.copy_stream("out"), device.copy_stream("in")
    tensor, begin = device.allocate(10**9), device.mark()
    assert device.allocated_bytes() >= 10**9
    assert device.copy(out, [tensor], [tensor]) == 1
    copied = device.record(out)
    device.run(5.0)
    assert not device.has_passed(copied)
    assert device.timed_wait(device.current_stream(), copied).elapsed_ms() == pytest.approx(15.0)
    assert device.has_passed(copied)
    device.copy(out, [tensor], [tensor])
    device.copy(back, [tensor], [tensor])  # 25 GB/s, since the other one goes on
    device.wait(out, device.record(back))
    assert device.timed_wait(device.current_stream(), device.record(out)).elapsed_ms() == pytest.approx(40.0)
    device.close()
    assert device.mark().elapsed_ms_since(begin) == pytest.approx(60.0)
