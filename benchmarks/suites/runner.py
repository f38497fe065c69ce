"""Run a suite: the methods of a case in turn, round by round, each run in a separate process.

While one process builds its model, the next process imports its packages and then waits. The running process starts
its timed steps only once the next one waits, so that no other process works during a measurement.
"""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.rows import NOT_READY, NOT_STABLE
from benchmarks.runner.launch import Child, Finished
from benchmarks.runner.planning import stages_text
from benchmarks.runner.request import Request
from benchmarks.suites.budgets import NotReady
from benchmarks.suites.methods import Method
from benchmarks.suites.results import Run, SuiteResults
from benchmarks.suites.suite import Case, Suite


@dataclass(frozen=True)
class Item:
    """One run of a suite."""

    case: Case
    method: Method
    number: int
    """Round, from 1."""

    @property
    def label(self) -> str:
        return f"{self.case.name} {self.method.name} round {self.number}"


def items(suite: Suite) -> Iterator[Item]:
    """Yield all runs of a suite: within a case, round by round, every method once per round."""
    for case in suite.cases:
        for number in range(1, case.rounds + 1):
            for method in case.methods:
                yield Item(case, method, number)


def measure(
    suite: Suite, results: SuiteResults, *, time_limit_s: float | None, on_done: Callable[[Item, Run, float], None]
) -> bool:
    """Make the open runs of a suite. `on_done` is called with each run and its duration in seconds.

    Returns:
        `True`: all runs are done. `False`: another run as long as the longest would not end within `time_limit_s`.
    """
    began, longest_s = time.monotonic(), 0.0
    child: Child | None = None
    ahead: Child | None = None
    try:
        todo = _open_items(suite, results)
        while todo:
            item, start = todo[0], time.monotonic()
            if time_limit_s is not None and start - began + longest_s > time_limit_s:
                return False
            request = _request(results, item)
            if isinstance(request, dict):
                run: Run = request
            else:
                if ahead is not None and ahead.request != request:  # started for another run
                    ahead.close()
                    ahead = None
                with undisturbed():
                    child, ahead = ahead or Child(request, on_gpu=suite.on_gpu), None
                child.say("go")
                with undisturbed():
                    ahead = _next_child(suite, results, todo[1:])
                run = _run(child.finish(suite.time_limit_s, suite.host_limit_gib, _Starter(child, ahead)))
                child.close()
                child = None
            run["round"] = item.number
            results.add(item.case, item.method, run)
            longest_s = max(longest_s, time.monotonic() - start)
            on_done(item, run, time.monotonic() - start)
            todo = _open_items(suite, results)
    finally:
        for process in (child, ahead):
            if process is not None:
                process.close()
    return True


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the block ends, so that a process started in it is always closed."""
    waiting: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: waiting.append(number)) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])


class _Starter:
    """Start the timed steps of the running process once the next process is quiet."""

    def __init__(self, child: Child, ahead: Child | None) -> None:
        self._child, self._ahead, self._has_started = child, ahead, False

    def __call__(self) -> None:
        if not self._has_started and (self._ahead is None or self._ahead.is_quiet()):
            self._child.say("time")
            self._has_started = True


def _open_items(suite: Suite, results: SuiteResults) -> list[Item]:
    return [item for item in items(suite) if not results.is_done(item.case, item.method, item.number)]


def _request(results: SuiteResults, item: Item) -> Request | Run:
    """Return the request of a run; for a run that cannot be made, its result with the reason."""
    if (package := missing(item.method)) is not None:
        return {"outcome": f"missing: {package}", "output_tail": f"no module named {package}"}
    try:
        return results.request(item.case, item.method)
    except NotReady as error:
        return {"outcome": NOT_READY, "output_tail": str(error)}


def _next_child(suite: Suite, results: SuiteResults, todo: list[Item]) -> Child | None:
    """Start the process of the next run that can be made; `None` if its budget depends on the current run."""
    following = next((item for item in todo if missing(item.method) is None), None)
    request = None if following is None else _request(results, following)
    return Child(request, on_gpu=suite.on_gpu) if isinstance(request, Request) else None


def missing(method: Method) -> str | None:
    """Return the first missing package of a method; `None`: all are installed."""
    packages = [name.split(".")[0] for name in method.piece.requires]
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


def _run(finished: Finished) -> Run:
    if finished.outcome != "ok":
        return {"outcome": finished.outcome, "output_tail": finished.output_tail}
    unstable = finished.result.get("unstable_steps")
    if unstable:
        stages = stages_text(finished.result["planning"])
        why = f"steps {unstable} were timed and not stable: begin later (warm_up_auto). Stages: {stages}"
        return {**finished.result, "outcome": NOT_STABLE, "output_tail": why}
    return {"outcome": "ok", **finished.result}
