"""Drops developers' lines that some versions of HiGHS print unasked (HiGHS.jl issue 312; scipy 1.18.1 has one)."""

import ctypes
import functools
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

UNASKED = b"HighsMipSolverData::"

_solving = threading.Lock()


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Drop such lines. Lines of other C code appear at the end. One thread at a time solves."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc, memory = ctypes.CDLL(None), _memory()
    with _solving:
        # Other threads print and start programs meanwhile, so no descriptor of the process is moved. Instead C's
        # variable `stdout`, which glibc lets programs assign, points to memory.
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        before = stdout.value
        stdout.value = memory.file
        try:
            yield
        finally:
            stdout.value = before
            kept = b"".join(line for line in memory.take().splitlines(True) if not line.startswith(UNASKED))
            libc.fwrite(kept, ctypes.c_size_t(1), ctypes.c_size_t(len(kept)), ctypes.c_void_p(before))


class _Memory:
    """A stream of C into memory. It is never closed: C code of other threads may be about to print to it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._text, self._num_bytes = ctypes.c_void_p(), ctypes.c_size_t()
        self._libc.open_memstream.restype = ctypes.c_void_p
        self.file = self._libc.open_memstream(ctypes.byref(self._text), ctypes.byref(self._num_bytes))
        if self.file is None:
            raise MemoryError

    def take(self) -> bytes:
        file = ctypes.c_void_p(self.file)
        self._libc.flockfile(file)
        try:
            self._libc.fflush(file)
            found = ctypes.string_at(self._text.value or 0, self._num_bytes.value)
            self._libc.rewind(file)
        finally:
            self._libc.funlockfile(file)
        return found


@functools.cache
def _memory() -> _Memory:
    return _Memory()
