"""Options, output and exit statuses that the programs with a result file share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.rows import Row

RUNS = ROOT / "runs"
"""The folder of result files without `--output`; git ignores it."""
RUNS_LEFT, INTERRUPTED = 75, 130
"""Exit statuses: runs are left at the time limit; the program was interrupted."""


def add_options(parser: argparse.ArgumentParser, *, default: str, row: str) -> None:
    """Add `--output`, `--resume` and `--time-limit-s`.

    Args:
        default: the name of the result file in `RUNS` without `--output`, for the help text.
        row: what one row of the file is for.
    """
    where = f"result file, one row per {row} (default: {short(RUNS)}/{default})"
    parser.add_argument("--output", type=Path, help=where)
    parser.add_argument("--resume", action="store_true", help="continue the output file: skip the runs in it")
    parser.add_argument("--time-limit-s", type=float, help="start no run that may not end within this time")


def short(path: Path) -> str:
    """Return a path as a user types it: relative to the working directory where it lies below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, default: str) -> None:
    """Set `--output`, to `default` in `RUNS` unless given, and check it and `--time-limit-s`.

    The program ends where they are wrong.
    """
    options.output = Path(short(RUNS / default)) if options.output is None else options.output
    if options.time_limit_s is not None and not options.time_limit_s > 0:
        parser.error(f"--time-limit-s {options.time_limit_s:g}: must be more than 0")
    if options.output.suffix != ".jsonl":
        # Table and picture have the same name with other suffixes, and must not overwrite the rows.
        parser.error(f"--output {options.output}: the name of the rows must end in .jsonl")


def interrupt(number: int, frame: Any) -> None:
    """Handle SIGTERM like Ctrl-C: measured processes are stopped; finished runs are already written."""
    raise KeyboardInterrupt


def measure_all(measure: Callable[[], bool]) -> int:
    """Call `measure`, which returns whether all runs are done, and return the exit status."""
    try:
        if measure():
            return 0
        print("time is up: continue with --resume", flush=True)
        return RUNS_LEFT
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept, continue with --resume", flush=True)
        return INTERRUPTED


def write_pages(output: Path, page: str, draw: Callable[[Path], None] | None) -> None:
    """Write the table and the picture beside the result file `output`, and print the table and the paths."""
    written = [output, output.with_suffix(".md")]
    written[1].write_text(page)
    if draw is not None:
        written.append(output.with_suffix(".png"))
        draw(written[-1])
    print(f"{page}\nwritten: {', '.join(map(str, written))}", flush=True)


def print_failed(rows: Sequence[Row], outcomes: Collection[str]) -> bool:
    """Print the failed runs and those with one of the `outcomes`; return whether there are any."""
    failed = [row for row in rows if row["outcome"] in outcomes or row["outcome"].startswith("failed")]
    for row in failed:
        print(f"{row['case']} {row['method']}: {row['outcome']}\n{row['output_tail']}", file=sys.stderr)
    return bool(failed)
