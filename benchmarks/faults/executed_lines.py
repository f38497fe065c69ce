"""Note which test executes which lines of the package, also in the processes that it starts or forks.

A pytest plugin. In a copy of the tree with a ``sitecustomize.py`` that imports it, it watches each Python process, and
writes lines to a file named after the running test. The pytest worker and all processes below it have that name mapped
(16 bytes), so that a process that serves many tests gives each its own lines. A fixture for more than one test gives
its lines to all tests of their file; lines that run at import have no test.
"""

import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType
from typing import Any

from pluggy import HookimplMarker  # pytest itself takes each process 0.3 s to import

PACKAGE = f"{Path(__file__).resolve().parents[2] / 'megatron/swap'}/"
VARIABLE = "SWAP_EXECUTED_LINES"
"""Environment variable: the file with the name of the running test. The files of lines are made beside it."""
TOOL, LINE = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
hook = HookimplMarker("pytest")(wrapper=True)


def name_of(test: str) -> str:
    """Return the name of the file of lines of ``test``; empty: of lines that belong to no test."""
    return hashlib.sha256(test.encode()).hexdigest()[:16]


class _Watch:
    def __init__(self) -> None:
        self.test = ""
        self.is_worker = False
        self._seen: set[tuple[str, int]] = set()
        self._name, self._output = b"", -1
        self.map_name(Path(os.environ[VARIABLE]))
        sys.monitoring.use_tool_id(TOOL, "executed lines")
        sys.monitoring.register_callback(TOOL, LINE, self._note)
        sys.monitoring.set_events(TOOL, LINE)
        os.register_at_fork(after_in_child=self._forked)

    def map_name(self, path: Path) -> None:
        self.folder = path.parent
        with path.open("r+b") as file:
            self._running = mmap.mmap(file.fileno(), 16)

    def _forked(self) -> None:
        self.is_worker = False
        sys.monitoring.restart_events()

    def _note(self, code: CodeType, line: int) -> object:
        if not code.co_filename.startswith(PACKAGE):
            return sys.monitoring.DISABLE
        if (name := self._running[:16]) != self._name:
            self._name = name
            self._seen.clear()
            if self._output >= 0:
                os.close(self._output)
            self._output = os.open(self.folder / name.decode(), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if (code.co_filename, line) not in self._seen:
            self._seen.add((code.co_filename, line))
            # Written at once, since a process may be killed.
            os.write(self._output, f"{code.co_filename[len(PACKAGE) :]}:{line}\n".encode())
        # In other processes a line stays on: nothing there tells that the next test has begun.
        return sys.monitoring.DISABLE if self.is_worker else None

    def begin(self, test: str) -> None:
        if test != self.test:
            self.test = test
            self._running[:16] = name_of(test).encode()
            sys.monitoring.restart_events()


_watch: Any = _Watch() if VARIABLE in os.environ else None
_outcomes: set[str] = set()


def pytest_configure() -> None:
    path = _watch.folder / f"running-{os.getpid()}"
    path.write_text(name_of(""))
    _watch.map_name(path)
    os.environ[VARIABLE] = str(path)
    _watch.is_worker = True


def pytest_runtest_logreport(report: Any) -> None:
    _outcomes.add(report.outcome)


@hook
def pytest_runtest_protocol(item: Any) -> Generator[None, Any, Any]:
    _outcomes.clear()
    _watch.begin(item.nodeid)
    began = time.monotonic()
    result = yield
    row = {"test": item.nodeid, "seconds": time.monotonic() - began, "passed": _outcomes == {"passed"}}
    _watch.begin("")
    with (_watch.folder / f"tests-{os.getpid()}").open("a") as file:
        file.write(json.dumps(row) + "\n")
    return result


@hook
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    test = _watch.test
    if fixturedef.scope != "function":
        _watch.begin(test.partition("::")[0])
    try:
        return (yield)
    finally:
        _watch.begin(test)
