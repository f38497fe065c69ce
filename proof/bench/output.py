"""What programs that fill a file of rows share: their options, who may write it, and how they end."""

from __future__ import annotations

import argparse
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from proof.bench.toml_file import SuiteError

RUNS_LEFT, INTERRUPTED = 75, 130
"""Exit statuses."""


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """``--time-limit-s`` and ``--output``; ends the program where they cannot be."""
    if options.time_limit_s is not None and not options.time_limit_s > 0:
        parser.error(f"--time-limit-s {options.time_limit_s:g}: must be more than 0")
    if options.output.suffix != ".jsonl":
        # The table and the picture take its name with another suffix: they must not take its place.
        parser.error(f"--output {options.output}: the name of the rows must end in .jsonl")


def check_beside(path: Path) -> None:
    """Table and picture take the name of the rows: before there are any, those that are there are somebody's.

    Raises:
        SuiteError: names the file that would be overwritten.
    """
    for other in (path.with_suffix(".md"), path.with_suffix(".png")):
        if other.exists() and (not path.exists() or not path.stat().st_size or not other.is_file()):
            raise SuiteError(f"--output {path}: {other} is there, and would be overwritten. Name another file.")


def interrupt(number: int, frame: Any) -> None:
    """Being told to end is being interrupted: measured processes are stopped, what is done is written."""
    raise KeyboardInterrupt


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock of an output file: of two programs that rewrite it, each would lose the other's rows.

    Raises:
        SuiteError: another program holds it, or the file cannot be one.
    """
    if path.exists() and not path.is_file():
        raise SuiteError(f"--output {path} is no file")
    path.parent.mkdir(parents=True, exist_ok=True)
    real = path.resolve()  # a file may have several names
    lock = real.with_name(f".{real.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = lock.exists() and lock.samefile(f"/proc/self/fd/{file.fileno()}")
        except BlockingIOError:
            is_ours = False
        if not is_ours:  # held, or removed by its holder since we opened it
            raise SuiteError(f"--output {path}: another run is writing it; wait for its end, or name another file")
        try:
            yield
        finally:
            lock.unlink()
