"""A nameless file on a local disk, for bytes that are needed only while training runs.

No other process can open the file, and no end of this process leaves anything of it. Space is reserved before bytes are
written, and kept until the end. kvikio was tried: it needs a CUDA driver at import, and its threads do as
``os.preadv`` does, which holds no GIL.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.swap.common.disk_buffers import BLOCK_BYTES
from megatron.swap.common.leftovers import own_file
from megatron.swap.common.log import logger
from megatron.swap.common.rounding import round_up
from megatron.swap.common.types import GIB, MIB, SwapError, UsageError, format_bytes

CHUNK_BYTES = 16 * MIB  # that one thread reads or writes in one call
NUM_THREADS = 4  # for reading, and as many for writing: enough to keep one disk busy
SPARE_BYTES = 1 * GIB  # left free on the disk for checkpoints, where no limit is given


class DiskError(SwapError):
    """The disk is full, or has failed. The message names the folder and the flag to change."""


@dataclass(eq=False, frozen=True)
class DiskRoom:
    """Some bytes of a ``DiskFile``. The last block has bytes of no other room."""

    file: DiskFile
    offset: int  # in the file; a multiple of BLOCK_BYTES
    num_bytes: int

    def view(self) -> torch.Tensor:
        """Map the bytes as uint8. While such a tensor lives, ``DiskFile`` must not read or write these bytes."""
        with torch.inference_mode(False):
            return torch.frombuffer(self.file.mapping(), dtype=torch.uint8, count=self.num_bytes, offset=self.offset)


class Traffic:
    """Counts the bytes read and written, and the seconds of ``clock`` during which the disk was busy."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # reads and writes are counted on the file's threads
        self._num_under_way = 0
        self._began = self._busy_s = 0.0
        self._num_bytes = 0

    @contextmanager
    def count(self, num_bytes: int) -> Iterator[None]:
        """Count one read or write of ``num_bytes`` on this thread, while the context lasts."""
        with self._lock:
            if not self._num_under_way:
                self._began = self._clock()
            self._num_under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_bytes += num_bytes
                self._num_under_way -= 1
                if not self._num_under_way:
                    self._busy_s += self._clock() - self._began

    def take_ms_per_gib(self) -> float:
        """Return the busy milliseconds per GiB of the transfers that ended since the last call; 0 if none ended."""
        with self._lock:
            found = 0.0 if not self._num_bytes else self._busy_s * 1e3 / (self._num_bytes / GIB)
            self._busy_s, self._num_bytes = 0.0, 0
        return found


def disk_limit_bytes(folder: str | Path, limit_bytes: int | None = None, num_ranks: int = 1) -> int:
    """Return the bytes that each of ``num_ranks`` ranks of this host may take on the disk of ``folder``.

    ``limit_bytes`` by default is an equal part of (free bytes - ``SPARE_BYTES``). Raises a ``UsageError`` if ``folder``
    is no folder, or has too little room for all ranks.
    """
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise _unusable(folder, error) from error
    if limit_bytes is None:
        if free_bytes <= SPARE_BYTES:
            raise UsageError(
                f"--swap-disk-dir {folder}: {format_bytes(free_bytes)} are free there, and {format_bytes(SPARE_BYTES)} "
                "are left to others. Say how much it may take with --swap-disk-gib, or name another folder."
            )
        return (free_bytes - SPARE_BYTES) // num_ranks
    if limit_bytes * num_ranks > free_bytes:
        of_each = f", for each of {num_ranks} ranks" if num_ranks > 1 else ""
        raise UsageError(
            f"--swap-disk-gib: {format_bytes(limit_bytes)} are asked for{of_each}, {format_bytes(free_bytes)} are free "
            f"in {folder}. Lower it, or name another --swap-disk-dir."
        )
    return limit_bytes


def _unusable(folder: str | Path, error: OSError) -> UsageError:
    return UsageError(
        f"--swap-disk-dir {folder}: no file can be made there ({error.strerror}). Name a folder on a local disk that "
        "this user may write to."
    )


class DiskFile:
    """A nameless file on the disk of ``folder``, with threads of its own, or a ``UsageError`` if it cannot be made."""

    def __init__(self, folder: str | Path, limit_bytes: int) -> None:
        self._folder = folder
        self.limit_bytes = limit_bytes
        try:
            self.descriptor = _open_nameless(Path(folder))
        except OSError as error:
            raise _unusable(folder, error) from error
        self.reserved_bytes = 0  # size of the file, all of it allocated on the disk
        self.traffic = Traffic()  # of all reads and writes
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self.is_direct = True
        try:  # direct I/O bypasses the page cache, which saves host memory
            self._direct = _open_direct(self.descriptor)
        except OSError as error:
            self.is_direct = False
            self._direct = os.dup(self.descriptor)
            logger.warning("%s takes no direct I/O (%s): it goes through the page cache", folder, error.strerror)
        self._open = [self.descriptor, self._direct]
        self._readers = ThreadPoolExecutor(NUM_THREADS, "swap-disk-read")
        self._writers = ThreadPoolExecutor(NUM_THREADS, "swap-disk-write")

    def take_all(self, sizes: Sequence[int]) -> list[DiskRoom]:
        """Reserve room for each of ``sizes`` in bytes, or raise a ``DiskError`` and reserve nothing."""
        num_bytes = sum(map(padded, sizes))
        if self.reserved_bytes + num_bytes > self.limit_bytes:
            raise DiskError(
                f"{format_bytes(num_bytes)} more are needed on disk: {format_bytes(self.reserved_bytes)} are reserved "
                f"in {self._folder}, the limit is {format_bytes(self.limit_bytes)}. Raise --swap-disk-gib or "
                "--swap-host-gib, or swap less (--swap-optimizer, --swap-layers)."
            )
        try:
            if num_bytes:
                os.posix_fallocate(self.descriptor, self.reserved_bytes, num_bytes)
        except OSError as error:
            raise self._failed(error, f"reserving {format_bytes(num_bytes)}") from error
        rooms, offset = [], self.reserved_bytes
        for size in sizes:
            rooms.append(DiskRoom(self, offset, size))
            offset += padded(size)
        self.reserved_bytes = offset
        return rooms

    def mapping(self) -> mmap.mmap:
        """Map the whole file into memory, once for all callers: a mapping takes a file descriptor."""
        mapping = self._mapping() if self._mapping is not None else None
        if mapping is None or len(mapping) < self.reserved_bytes:
            mapping = mmap.mmap(self.descriptor, self.reserved_bytes)
            self._mapping = weakref.ref(mapping)
        return mapping

    def read(self, room: DiskRoom, start: int, target: torch.Tensor) -> list[Future[None]]:
        """Fill ``target`` (uint8, whole blocks in whole pages) from byte ``start`` of ``room``, where a block begins.

        Return a future a chunk, which may raise ``DiskError``. The caller keeps ``target`` until all are done.
        """
        return [
            self._readers.submit(self._move, True, chunk, room.offset + start + at) for at, chunk in _chunks(target)
        ]

    def write(
        self, room: DiskRoom, start: int, source: torch.Tensor, ready: Callable[[], object]
    ) -> list[Future[None]]:
        """Write ``source`` as ``read`` reads, once ``ready`` returns. Other threads call ``ready``, once a chunk."""

        def write(chunk: memoryview, offset: int) -> None:
            ready()
            self._move(False, chunk, offset)

        return [self._writers.submit(write, chunk, room.offset + start + at) for at, chunk in _chunks(source)]

    def _move(self, is_read: bool, memory: memoryview, offset: int) -> None:
        call, what = (os.preadv, "reading") if is_read else (os.pwritev, "writing")
        done = 0  # a call may move fewer bytes than asked for
        with self.traffic.count(len(memory)):
            while done < len(memory):
                try:
                    moved = call(self._direct, [memory[done:]], offset + done)
                except OSError as error:
                    raise self._failed(error, what) from error
                moved -= moved % BLOCK_BYTES if self.is_direct else 0  # a block moved in part is repeated
                if moved <= 0:
                    raise self._failed(OSError(errno.EIO, os.strerror(errno.EIO)), what)
                done += moved

    def _failed(self, error: OSError, what: str) -> DiskError:
        with suppress(OSError):
            free = f", {format_bytes(shutil.disk_usage(self._folder).free)} are free"
            return DiskError(
                f"--swap-disk-dir {self._folder}: {what} failed ({error.strerror}{free}). A checkpoint that "
                "was saved is intact: go on from it, with another --swap-disk-dir or with less on disk (a lower "
                "--swap-disk-gib, a higher --swap-host-gib)."
            )
        return DiskError(f"--swap-disk-dir {self._folder}: {what} failed ({error.strerror}).")

    def close(self) -> None:
        """Finish all reads and writes, then close the file. A mapping lives until its last tensor dies."""
        for threads in (self._readers, self._writers):
            threads.shutdown()
        while self._open:  # at a second call the numbers may be those of other files
            os.close(self._open.pop())


def _chunks(memory: torch.Tensor) -> list[tuple[int, memoryview]]:
    view = memoryview(memory.numpy())
    return [(at, view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES)]


def padded(num_bytes: int) -> int:
    return round_up(num_bytes, BLOCK_BYTES)


def _open_direct(descriptor: int) -> int:
    """Open the same file for direct I/O. Raises ``OSError`` if direct reads fail."""
    direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT)
    try:
        os.preadv(direct, [mmap.mmap(-1, BLOCK_BYTES)], 0)
    except OSError:
        os.close(direct)
        raise
    return direct


def _open_nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    with own_file(folder, ".megatron-swap-disk-", 0o600) as (path, descriptor):
        path.unlink()
        return os.dup(descriptor)
