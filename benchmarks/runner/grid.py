"""Make the runs of a grid of methods and cases, each in a process of its own, and write what they found.

While one process builds its model, the next process imports its packages and then waits. The running process starts
its timed steps only once the next one waits, so that no other process works during a measurement.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from benchmarks.rows import NOT_READY, Row
from benchmarks.runner.launch import Child
from benchmarks.runner.program import INTERRUPTED, RUNS_LEFT
from benchmarks.runner.request import NotReady, Request

Run = dict[str, Any]  # The result of one process: `outcome`, and `output_tail` if it failed, else its measurements


class Item(Protocol):
    @property
    def label(self) -> str: ...

    @property
    def requires(self) -> Sequence[str]: ...


class Grid[One: Item](Protocol):
    """Runs to make, the next one first, and what is known of those that were made. ``add`` returns a run as a line."""

    on_gpu: bool
    time_limit_s: float
    host_limit_gib: float | None

    def todo(self) -> list[One]: ...
    def num_left(self) -> int: ...
    def request(self, item: One) -> Request: ...
    def add(self, item: One, run: Run, seconds: float) -> str: ...
    def rows(self) -> list[Row]: ...


class Runner[One: Item]:
    """Makes runs of a grid, and starts the process of the next one ahead."""

    def __init__(self, grid: Grid[One]) -> None:
        self._grid = grid
        self._child: Child | None = None
        self._ahead: Child | None = None
        self._is_timed = False

    def make(self, item: One, following: Sequence[One]) -> Run:
        request = self._request(item)
        if isinstance(request, dict):
            return request
        if self._ahead is not None and self._ahead.request != request:  # started for another run
            self._ahead.close()
            self._ahead = None
        # A process that a signal hides from us has not been told to go: it ends when its input is closed.
        self._child, self._ahead = self._ahead or Child(request, on_gpu=self._grid.on_gpu), None
        self._child.say("go")
        self._is_timed = False
        able = next((one for one in following if missing(one) is None), None)
        beyond = None if able is None else self._request(able)
        if isinstance(beyond, Request):
            self._ahead = Child(beyond, on_gpu=self._grid.on_gpu)
        finished = self._child.finish(self._grid.time_limit_s, self._grid.host_limit_gib, self._start_timing)
        self._child.close()
        self._child = None
        if finished.outcome != "ok":
            return {"outcome": finished.outcome, "output_tail": finished.output_tail}
        return {"outcome": "ok", **finished.result}

    def _start_timing(self) -> None:
        if self._child is not None and not self._is_timed and (self._ahead is None or self._ahead.is_quiet()):
            self._child.say("time")
            self._is_timed = True

    def _request(self, item: One) -> Request | Run:
        if (package := missing(item)) is not None:
            return {"outcome": f"missing: {package}", "output_tail": f"no module named {package}"}
        try:
            return self._grid.request(item)
        except NotReady as error:
            return {"outcome": NOT_READY, "output_tail": str(error)}

    def close(self) -> None:
        for process in (self._child, self._ahead):
            if process is not None:
                process.close()


def missing(item: Item) -> str | None:
    packages = [name.split(".")[0] for name in item.requires]
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


def measure[One: Item](
    grid: Grid[One], time_limit_s: float | None, make: Callable[[One, Sequence[One]], Run] | None = None
) -> bool:
    """Make the open runs of a grid; ``False``: another one would not end within `time_limit_s`."""
    began, longest_s, num_done = time.monotonic(), 0.0, 0
    runner = Runner(grid)
    try:
        while todo := grid.todo():
            start = time.monotonic()
            if time_limit_s is not None and start - began + longest_s > time_limit_s:
                return False
            run = (make or runner.make)(todo[0], todo[1:])
            end = time.monotonic()
            longest_s, num_done = max(longest_s, end - start), num_done + 1
            line, left = grid.add(todo[0], run, end - start), grid.num_left()
            left_s = left * (end - began) / num_done
            more = f"; about {left_s / 60:.0f} min left" if left_s >= 30 else ""
            print(f"[{num_done}/{num_done + left}] {line}{more}", flush=True)
    finally:
        runner.close()
    return True


def run_grid[One: Item](
    grid: Grid[One], output: Path, time_limit_s: float | None, page: Callable[[list[Row]], str],
    draw: Callable[[list[Row]], Figure | None], bad: Collection[str],
) -> int:  # fmt: skip
    """Make the open runs of a grid, write table and picture beside its result file, and return the exit status."""
    status = 0
    try:
        if not measure(grid, time_limit_s):
            print("time is up: continue with --resume", flush=True)
            status = RUNS_LEFT
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept, continue with --resume", flush=True)
        status = INTERRUPTED
    rows = grid.rows()
    if rows:
        text, written = page(rows), [output, output.with_suffix(".md")]
        written[1].write_text(text)
        if (figure := draw(rows)) is not None:
            written.append(output.with_suffix(".png"))
            figure.savefig(written[-1])
        print(f"{text}\nwritten: {', '.join(map(str, written))}", flush=True)
    if status:
        return status
    failed = [row for row in rows if row["outcome"] in bad or row["outcome"].startswith("failed")]
    for row in failed:
        print(f"{row['case']} {row['method']}: {row['outcome']}\n{row['output_tail']}", file=sys.stderr)
    return int(bool(failed))
