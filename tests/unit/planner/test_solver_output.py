"""HiGHS prints lines of its developers; nothing else is lost, and no descriptor moves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from megatron.swap.planner.solver_output import without_solver_lines

SCRIPT = """
import ctypes, os, sys
from megatron.swap.planner.solver_output import without_solver_lines
libc = ctypes.CDLL(None)
libc.printf(b"of C, before\\n")
for _ in range(2):
    with without_solver_lines():
        libc.printf(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\\n")
        libc.puts(b"of C")
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
    assert sorted(lines) == sorted(["of C, before", *2 * ["of Python", "of a child", "of C"], "after"])


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


def test_threads_that_solve_at_once_take_turns_and_move_no_descriptor() -> None:
    inside, leave, order = threading.Event(), threading.Event(), list[str]()
    before = os.fstat(1)

    def solve_first() -> None:
        with without_solver_lines():
            inside.set()
            leave.wait()
            order.append("first")

    def solve_second() -> None:
        with without_solver_lines():
            order.append("second")

    threads = [threading.Thread(target=solve_first), threading.Thread(target=solve_second)]
    threads[0].start()
    inside.wait()
    assert os.path.samestat(os.fstat(1), before)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join()
    assert order == ["first", "second"]
    assert os.path.samestat(os.fstat(1), before)
