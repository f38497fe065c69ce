"""Keeps what HiGHS prints unasked from users.

Some of its versions print a line of its developers to C's standard output, whatever its options (HiGHS.jl issue 312;
scipy 1.18.1 has such a version): dozens of times amid a plan, or in a file that a plan is piped to.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

UNASKED = b"HighsMipSolverData::"
STDOUT = 1


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Drop such lines. All else that this process prints meanwhile, other threads' as well, appears at the end."""
    flush = ctypes.CDLL(None).fflush
    try:
        terminal = os.dup(STDOUT)
    except OSError:  # standard output is closed
        yield
        return
    flush(None)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), STDOUT)
        try:
            yield
        finally:
            flush(None)
            os.dup2(terminal, STDOUT)
            os.close(terminal)
            caught.seek(0)
            for line in caught:
                if not line.startswith(UNASKED):
                    os.write(STDOUT, line)
