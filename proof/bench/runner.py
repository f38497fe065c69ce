"""Runs a suite: the methods of a case in turn, round by round, each run in a process of its own.

While one process builds its model, the next one already imports; it then waits, and only when it does, the running one
goes on from its first step to those that are timed. So nothing but the measured run works while it is measured.
"""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from proof.bench.budgets import NotReady
from proof.bench.methods import Method
from proof.bench.results import Book, Run
from proof.bench.suite import Case, Suite
from proof.rows import NOT_READY, NOT_STABLE
from proof.run.launch import Child, Finished
from proof.run.request import Request


@dataclass(frozen=True)
class Item:
    """One run to do."""

    case: Case
    method: Method
    number: int
    """Round, from 1."""

    @property
    def label(self) -> str:
        return f"{self.case.name} {self.method.name} round {self.number}"


def items(suite: Suite) -> Iterator[Item]:
    """All runs of a suite: every method of a case once, then again."""
    for case in suite.cases:
        for number in range(1, case.rounds + 1):
            for method in case.methods:
                yield Item(case, method, number)


def measure(
    suite: Suite, book: Book, *, time_limit_s: float | None, on_done: Callable[[Item, Run, float], None]
) -> bool:
    """Do what of the suite is not done yet; ``on_done`` gets each run and the seconds that it took.

    Returns:
        Whether all was done: ``False`` when another run as long as the longest would not end within ``time_limit_s``.
    """
    began, longest_s = time.monotonic(), 0.0
    child: Child | None = None
    ahead: Child | None = None
    try:
        todo = _open_items(suite, book)
        while todo:
            item, start = todo[0], time.monotonic()
            if time_limit_s is not None and start - began + longest_s > time_limit_s:
                return False
            request = _request(book, item)
            if isinstance(request, dict):
                run: Run = request
            else:
                if ahead is not None and ahead.request != request:  # what was foreseen has become idle
                    ahead.close()
                    ahead = None
                with undisturbed():
                    child, ahead = ahead or Child(request, on_gpu=suite.on_gpu), None
                child.say("go")
                with undisturbed():
                    ahead = _next_child(suite, book, todo[1:])
                run = _run(child.finish(suite.time_limit_s, suite.host_limit_gib, _Starter(child, ahead)))
                child.close()
                child = None
            run["round"] = item.number
            book.add(item.case, item.method, run)
            longest_s = max(longest_s, time.monotonic() - start)
            on_done(item, run, time.monotonic() - start)
            todo = _open_items(suite, book)
    finally:
        for process in (child, ahead):
            if process is not None:
                process.close()
    return True


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that end us wait until the block is through: a process that it starts is known by then, and can be
    closed."""
    held: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: held.append(number)) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


class _Starter:
    """Tells the running process to time its steps, once the next one is quiet."""

    def __init__(self, child: Child, ahead: Child | None) -> None:
        self._child, self._ahead, self._told = child, ahead, False

    def __call__(self) -> None:
        if not self._told and (self._ahead is None or self._ahead.is_quiet()):
            self._child.say("time")
            self._told = True


def _open_items(suite: Suite, book: Book) -> list[Item]:
    return [item for item in items(suite) if not book.is_done(item.case, item.method, item.number)]


def _request(book: Book, item: Item) -> Request | Run:
    """What the process is told; or the run that cannot be, with the reason."""
    if (package := missing(item.method)) is not None:
        return {"outcome": f"missing: {package}", "output_tail": f"no module named {package}"}
    try:
        return book.request(item.case, item.method)
    except NotReady as error:
        return {"outcome": NOT_READY, "output_tail": str(error)}


def _next_child(suite: Suite, book: Book, todo: list[Item]) -> Child | None:
    """The process of the next run that can be: if it waits for the one of now to tell its budget, none yet."""
    following = next((item for item in todo if missing(item.method) is None), None)
    request = None if following is None else _request(book, following)
    return Child(request, on_gpu=suite.on_gpu) if isinstance(request, Request) else None


def missing(method: Method) -> str | None:
    """The first package that the method needs and this Python lacks; what that one lacks, its process finds out."""
    packages = [name.split(".")[0] for name in method.piece.requires]
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


def _run(finished: Finished) -> Run:
    if finished.outcome != "ok":
        return {"outcome": finished.outcome, "output_tail": finished.output_tail}
    unstable = finished.result.get("unstable_steps")
    if unstable:
        stages = "; ".join(
            f"{stage['stage']} {stage['first_step']} to {stage['last_step']}: {stage['note']}"
            for stage in finished.result["planning"]["stages"]
        )
        said = f"steps {unstable} were timed and not stable: begin later (warm_up_auto). Stages: {stages}"
        return {**finished.result, "outcome": NOT_STABLE, "output_tail": said}
    return {"outcome": "ok", **finished.result}
