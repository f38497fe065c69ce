"""The dry device: its clock, its memory, and the blocks of its allocator."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron.swap.common.types import GIB, MIB
from megatron.swap.devices.dry import DryDevice
from megatron.swap.devices.dry_allocator import Block, DryAllocator
from tests.support import RESULTS


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
