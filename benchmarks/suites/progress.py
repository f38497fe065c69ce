"""Show progress: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.rows import GIB, MIB, PEAKS
from benchmarks.suites.results import Run
from benchmarks.suites.runner import Item


class Steps:
    """Show the number of finished steps and the estimated time left, while the context is open.

    Args:
        total: the expected number of steps; each `step` may change it.
        first: label of the first step.
    """

    def __init__(self, total: int, first: str, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._began = time.monotonic()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns: list[Any] = [
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(),
            ]  # fmt: skip
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(first, total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, num_done: int, total: int, text: str, following: str) -> None:
        """Report a finished step: ``text`` describes its result, ``following`` is the label of the next."""
        left_s = (total - num_done) * (time.monotonic() - self._began) / max(1, num_done)
        left = f"; about {left_s / 60:.0f} min left" if left_s >= 30 else ""
        self._console.print(f"[{num_done}/{total}] {text}{left}", markup=False, soft_wrap=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=num_done, total=total, description=following)


class Display(Steps):
    """Progress of a suite; pass ``done`` to ``measure`` as ``on_done``."""

    def __init__(self, todo: list[Item], console: Console | None = None) -> None:
        super().__init__(len(todo), todo[0].label if todo else "done", console)
        self._todo = todo

    def done(self, item: Item, run: Run, seconds: float) -> None:
        num_done = self._todo.index(item) + 1  # later rounds of what has failed are not run
        following = self._todo[num_done].label if num_done < len(self._todo) else "done"
        self.step(num_done, len(self._todo), line(item, run, seconds), following)


def line(item: Item, run: Run, seconds: float) -> str:
    """Describe one run in a line."""
    if run["outcome"] != "ok":
        return f"{item.label}: {run['outcome']} ({seconds:.0f} s)"
    peak = run.get(PEAKS[item.case.peak])
    if item.case.peak == "saved":
        held = "trains" if peak is None else f"autograd holds {peak * GIB / MIB:.1f} MiB"
        return f"{item.label}: {held} ({seconds:.0f} s)"
    device = "" if peak is None else f", peak {peak:.2f} GiB"
    return (
        f"{item.label}: step {run['step_ms_median']:.1f} ms{device}, host {run['host_peak_gib']:.2f} GiB "
        f"({seconds:.0f} s)"
    )
