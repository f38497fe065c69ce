"""Keeps what HiGHS prints unasked from users.

Some of its versions print a line of its developers to C's standard output, whatever its options (HiGHS.jl issue 312;
scipy 1.18.1 has such a version): dozens of times amid a plan, or in a file that a plan is piped to.

No descriptor of the process is moved: other threads print and start programs meanwhile. Instead C's variable ``stdout``
points to memory while a program is solved; glibc lets programs assign it. Other C libraries print such lines.
"""

from __future__ import annotations

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
    """Drop such lines. What other C code prints meanwhile appears at the end. One thread at a time solves."""
    if platform.libc_ver()[0] != "glibc":
        yield
        return
    libc, memory = ctypes.CDLL(None), _memory()
    with _solving:
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
        """Return what was printed since the last call."""
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
