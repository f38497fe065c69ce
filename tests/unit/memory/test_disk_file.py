"""The disk file: written bytes are read back, also when a call moves fewer bytes than asked; faults are errors."""

import errno
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.swap.common.types import GIB, MIB, UsageError
from megatron.swap.memory import disk_file
from megatron.swap.memory.disk_file import BLOCK_BYTES, DiskError, DiskFile, DiskRoom, Traffic, disk_limit_bytes


def aligned(num_bytes: int, seed: int | None = None) -> torch.Tensor:
    """Return random bytes that start at a page; zeros without ``seed``."""
    memory = torch.zeros(num_bytes + BLOCK_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % BLOCK_BYTES
    memory = memory[start : start + num_bytes]
    if seed is not None:
        memory.copy_(torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed)))
    return memory


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def written(disk: DiskFile, room: DiskRoom, start: int, data: torch.Tensor) -> None:
    for one in disk.write(room, start, data, lambda: None):
        one.result()


def back(disk: DiskFile, room: DiskRoom, start: int, num_bytes: int) -> torch.Tensor:
    target = aligned(num_bytes)
    for one in disk.read(room, start, target):
        one.result()
    return target


def test_what_is_written_is_read(disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_file, "CHUNK_BYTES", 3 * BLOCK_BYTES)
    rooms = disk.take_all([10 * BLOCK_BYTES, 1, 5 * BLOCK_BYTES + 17])
    data = [aligned(size * BLOCK_BYTES, seed) for seed, size in enumerate((10, 1, 6))]
    for room, one in zip(rooms, data, strict=True):
        written(disk, room, 0, one)
    written(disk, rooms[0], 4 * BLOCK_BYTES, data[0][:BLOCK_BYTES])
    data[0][4 * BLOCK_BYTES : 5 * BLOCK_BYTES] = data[0][:BLOCK_BYTES]
    for room, one in zip(rooms, data, strict=True):
        assert torch.equal(back(disk, room, 0, one.numel()), one)
    assert torch.equal(back(disk, rooms[0], 2 * BLOCK_BYTES, BLOCK_BYTES), data[0][2 * BLOCK_BYTES : 3 * BLOCK_BYTES])
    assert disk.reserved_bytes == 17 * BLOCK_BYTES


def test_a_view_is_the_file(disk: DiskFile) -> None:
    """A checkpoint reads the view and is loaded into it."""
    (room,) = disk.take_all([2 * BLOCK_BYTES + 100])
    data = aligned(3 * BLOCK_BYTES, seed=1)
    written(disk, room, 0, data)
    view = room.view()
    assert view.untyped_storage().nbytes() == 2 * BLOCK_BYTES + 100
    assert torch.equal(view, data[: view.numel()])
    view.fill_(7)
    del view
    assert bool((back(disk, room, 0, 2 * BLOCK_BYTES) == 7).all())
    written(disk, room, 0, data)
    assert torch.equal(room.view(), data[: 2 * BLOCK_BYTES + 100])


def test_a_write_waits_until_its_bytes_are_there(disk: DiskFile) -> None:
    (room,) = disk.take_all([BLOCK_BYTES])
    data = aligned(BLOCK_BYTES)

    def ready() -> None:
        time.sleep(0.05)
        data.fill_(9)

    for one in disk.write(room, 0, data, ready):
        one.result()
    assert bool((back(disk, room, 0, BLOCK_BYTES) == 9).all())


@pytest.mark.parametrize("most", [BLOCK_BYTES, 3 * BLOCK_BYTES - 1])
def test_calls_that_do_less_than_they_were_told(disk: DiskFile, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(call: Callable[..., int]) -> Callable[..., int]:
        def run(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            whole = call(descriptor, [buffers[0][: most // BLOCK_BYTES * BLOCK_BYTES]], offset)
            return min(most, whole + most % BLOCK_BYTES) if disk.is_direct else whole

        return run

    monkeypatch.setattr(os, "preadv", short(os.preadv))
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    (room,) = disk.take_all([7 * BLOCK_BYTES])
    data = aligned(7 * BLOCK_BYTES, seed=2)
    written(disk, room, 0, data)
    assert torch.equal(back(disk, room, 0, data.numel()), data)


def failing(number: int) -> Callable[..., int]:
    def call(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(("call", "fails", "use", "said"), [
    ("pwritev", failing(errno.ENOSPC), lambda disk, room: written(disk, room, 0, aligned(BLOCK_BYTES)),
     r"writing failed .* was saved is intact: .*--swap-disk-dir"),
    ("preadv", lambda *_: 0, lambda disk, room: back(disk, room, 0, BLOCK_BYTES), "reading failed"),
    ("posix_fallocate", failing(errno.ENOSPC), lambda disk, _: disk.take_all([2 * BLOCK_BYTES]),
     r"reserving 8\.0 KiB failed \(No space left on device, .* are free\)"),
])  # fmt: skip
def test_a_call_that_fails_is_an_error_with_a_way_out(
    disk: DiskFile, call: str, fails: Any, use: Callable[..., object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (room,) = disk.take_all([BLOCK_BYTES])
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(DiskError, match=said):
        use(disk, room)
    assert disk.reserved_bytes == BLOCK_BYTES


def test_all_ranks_of_a_host_take_as_much_and_leave_some_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=3 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert disk_limit_bytes(tmp_path, GIB, 3) == GIB
    assert disk_limit_bytes(tmp_path, None, 4) == GIB // 2
    with pytest.raises(UsageError, match=r"1\.00 GiB are asked for, for each of 4 ranks, 3\.00 GiB are free"):
        disk_limit_bytes(tmp_path, GIB, 4)
    free.free = GIB
    with pytest.raises(UsageError, match=r"1\.00 GiB are free there, and 1\.00 GiB .*--swap-disk-gib"):
        disk_limit_bytes(tmp_path)
    assert disk_limit_bytes(tmp_path, GIB) == GIB


@pytest.mark.parametrize("lacks", ["direct access", "nameless files"])
def test_what_a_file_system_may_lack(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, before = os.open, num_descriptors()

    def refuses(path: Any, flags: int, *more: Any) -> int:
        if lacks == "direct access" and flags & os.O_DIRECT:
            failing(errno.EINVAL)()
        if lacks == "nameless files" and flags & os.O_TMPFILE == os.O_TMPFILE:
            failing(errno.EOPNOTSUPP)()
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuses)
    disk = DiskFile(tmp_path, MIB)
    assert not disk.is_direct or lacks == "nameless files"
    assert ("takes no direct I/O" in caplog.text) is (lacks == "direct access")
    (room,) = disk.take_all([BLOCK_BYTES])
    assert list(tmp_path.iterdir()) == [], "its name goes at once: nothing is left of a process that is killed"
    data = aligned(BLOCK_BYTES, seed=3)
    written(disk, room, 0, data)
    assert torch.equal(back(disk, room, 0, BLOCK_BYTES), data)
    disk.close()
    assert num_descriptors() == before


def test_the_disk_is_busy_while_anything_is_under_way() -> None:
    now = 0.0
    traffic = Traffic(lambda: now)
    assert traffic.take_ms_per_gib() == 0
    with traffic.count(GIB):
        now = 2.0
        with traffic.count(2 * GIB):
            now = 3.0
        now = 4.0
    now = 10.0
    with suppress(DiskError), traffic.count(GIB):
        now = 12.0
        raise DiskError
    assert traffic.take_ms_per_gib() == pytest.approx(6000 / 4)
    assert traffic.take_ms_per_gib() == 0
