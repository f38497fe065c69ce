"""What a person sees while a suite runs: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from proof.bench.results import Run
from proof.bench.runner import Item
from proof.rows import PEAKS


class Display:
    """A context manager; ``done`` fits ``measure``."""

    def __init__(self, todo: list[Item], console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._todo = todo
        self._num_done = 0
        self._bar: Progress | None = None
        if self._console.is_terminal:
            columns: list[Any] = [
                SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeElapsedColumn(),
            ]  # fmt: skip
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(self._next(), total=len(todo))

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, item: Item, run: Run, seconds: float) -> None:
        self._num_done = self._todo.index(item) + 1  # later rounds of what has failed are not run
        text = f"[{self._num_done}/{len(self._todo)}] {line(item, run, seconds)}"
        self._console.print(text, markup=False, soft_wrap=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._num_done, description=self._next())

    def _next(self) -> str:
        return self._todo[self._num_done].label if self._num_done < len(self._todo) else "done"


def line(item: Item, run: Run, seconds: float) -> str:
    """One run in a line."""
    if run["outcome"] != "ok":
        return f"{item.label}: {run['outcome']} ({seconds:.0f} s)"
    peak = run.get(PEAKS[item.case.peak])
    device = "" if peak is None else f", peak {peak:.2f} GiB"
    return (
        f"{item.label}: step {run['step_ms_median']:.1f} ms{device}, host {run['host_peak_gib']:.2f} GiB "
        f"({seconds:.0f} s)"
    )
