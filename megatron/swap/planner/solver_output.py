"""Keeps what HiGHS prints unasked from users.

Some of its versions print a line of its developers to C's standard output, whatever its options (HiGHS.jl issue 312;
scipy 1.18.1 has such a version): dozens of times amid a plan, or in a file that a plan is piped to.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

UNASKED = b"HighsMipSolverData::"
STDOUT = 1


@contextmanager
def without_solver_lines() -> Iterator[None]:
    """Drop such lines. All else that this process prints meanwhile, other threads' as well, appears at the end.

    One thread at a time: the descriptor belongs to the process.
    """
    flush = ctypes.CDLL(None).fflush
    with ExitStack() as closing:
        try:
            terminal = closing.enter_context(os.fdopen(os.dup(STDOUT), "wb"))
            caught = closing.enter_context(tempfile.TemporaryFile())
        except OSError:  # standard output is closed, or no folder takes the file
            yield
            return
        flush(None)
        os.dup2(caught.fileno(), STDOUT)
        try:
            yield
        finally:
            flush(None)
            os.dup2(terminal.fileno(), STDOUT)
            caught.seek(0)
            terminal.writelines(line for line in caught if not line.startswith(UNASKED))
