"""HiGHS prints lines of its developers; nothing else is lost."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, os, sys
from megatron.swap.planner.solver_output import without_solver_lines
libc = ctypes.CDLL(None)
libc.printf(b"of C, before\\n")
with without_solver_lines():
    libc.printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\\n")
    libc.printf(b"of C\\n")
    print("of Python", flush=True)
    os.system("echo of a child")
print("after")
"""


def lines_of(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_unasked_lines_are_dropped_and_others_appear() -> None:
    lines = lines_of(SCRIPT)
    assert (lines[0], lines[-1]) == ("of C, before", "after")
    assert sorted(lines[1:-1]) == ["of C", "of Python", "of a child"]


def test_others_appear_if_the_solver_fails() -> None:
    failing = SCRIPT.replace('print("after")', "").replace("    os.system", "    sys.stdin.nothing\n    os.system")
    done = subprocess.run([sys.executable, "-c", failing], capture_output=True, text=True)
    assert "AttributeError" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["of C", "of C, before", "of Python"]


def test_standard_output_may_be_closed() -> None:
    closed = """
import os, sys
from megatron.swap.planner.solver_output import without_solver_lines
os.close(1)
with without_solver_lines():
    print("ran", file=sys.stderr)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", closed], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "ran\n")
