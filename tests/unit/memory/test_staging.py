"""Buffers between disk and device, whose copies run as late as the waits allow."""

from concurrent.futures import Future

import pytest
import torch

from megatron.swap.common.disk_buffers import NUM_AHEAD
from megatron.swap.memory.disk_file import BLOCK_BYTES, DiskFile, DiskRoom
from megatron.swap.memory.staging import Staging
from tests.lazy_device import LazyDevice
from tests.unit.memory.test_disk_file import aligned, back, written

NUM_SPANS = 2 * NUM_AHEAD + 3
"""So many that each buffer is used again."""


def bytes_number(number: int) -> torch.Tensor:
    return torch.full((BLOCK_BYTES,), number + 1, dtype=torch.uint8)


def rooms(disk: DiskFile) -> list[DiskRoom]:
    """Return rooms that hold their numbers."""
    found = disk.take_all([BLOCK_BYTES] * NUM_SPANS)
    for number, room in enumerate(found):
        memory = aligned(BLOCK_BYTES)
        written(disk, room, 0, memory.copy_(bytes_number(number)))
    return found


def test_a_buffer_is_kept_until_the_copies_out_of_it_are_over(disk: DiskFile) -> None:
    device, staging = LazyDevice(), Staging(disk, aligned, BLOCK_BYTES)
    stream, arrived = device.copy_stream("in"), []
    for room in rooms(disk):
        fetched = staging.fetch([(room, 0, BLOCK_BYTES)])
        arrived.append(device.allocate(BLOCK_BYTES))
        device.copy(stream, arrived[-1:], fetched.arrived(device, stream))
        fetched.copied(device, device.record(stream))
    device.synchronize()
    assert all(torch.equal(target, bytes_number(number)) for number, target in enumerate(arrived))


@pytest.mark.parametrize("is_missing", [False, True], ids=["", "planted"])
def test_a_write_waits_for_the_copy_to_its_buffer(disk: DiskFile, is_missing: bool) -> None:
    """Copies lag. The fault: the event is not the one behind the copies."""
    device, staging = LazyDevice(), Staging(disk, aligned, BLOCK_BYTES)
    passed = device.record(device.compute) if is_missing else None
    stream, found = device.copy_stream("out"), disk.take_all([BLOCK_BYTES] * NUM_SPANS)
    sources = list(map(bytes_number, range(NUM_SPANS)))
    for room, source in zip(found, sources, strict=True):
        chunks, write = staging.stage([(room, 0, BLOCK_BYTES)])
        device.copy(stream, chunks, [source])
        write(device, passed or device.record(stream))
    staging.synchronize()
    right = [torch.equal(back(disk, room, 0, BLOCK_BYTES), bytes_number(n)) for n, room in enumerate(found)]
    assert all(right) is not is_missing


def test_what_is_read_from_a_buffer_for_writes_waits_for_its_copy(disk: DiskFile) -> None:
    device, staging = LazyDevice(), Staging(disk, aligned, BLOCK_BYTES)
    out, into, target = device.copy_stream("out"), device.copy_stream("in"), device.allocate(BLOCK_BYTES)
    (room,) = disk.take_all([BLOCK_BYTES])
    span = (room, 0, BLOCK_BYTES)
    chunks, _ = staging.stage([span])
    device.copy(out, chunks, [source := bytes_number(3)])
    buffer = staging._for_writes[-1]  # the write itself may wait for the copy at any moment: it is left out
    buffer.content, buffer.event = {span: chunks[0]}, device.record(out)
    device.copy(into, [target], staging.fetch([span]).arrived(device, into))
    into.run_until(lambda: not into.work)
    assert torch.equal(target, source)


def test_a_write_is_waited_for_until_all_its_parts_are_over(disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, (room,), waited = Staging(disk, aligned, BLOCK_BYTES), disk.take_all([2 * BLOCK_BYTES]), []
    parts: list[Future[None]] = [Future(), Future()]
    parts[0].set_result(None)
    monkeypatch.setattr(parts[1], "result", lambda: waited.append(1))
    monkeypatch.setattr(disk, "write", lambda *_: parts)
    staging.stage([(room, 0, BLOCK_BYTES)])[1](LazyDevice(), LazyDevice().record(LazyDevice().compute))
    for start in (BLOCK_BYTES, 0):
        staging.stage([(room, start, start + BLOCK_BYTES)])
    assert waited
