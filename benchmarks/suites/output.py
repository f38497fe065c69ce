"""What the programs that fill a result file share: their options, and how they end."""

from __future__ import annotations

import argparse
from typing import Any

RUNS_LEFT, INTERRUPTED = 75, 130
"""Exit statuses: the time limit has left runs to do; the program was interrupted."""


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check `--time-limit-s` and `--output`; end the program where they are wrong."""
    if options.time_limit_s is not None and not options.time_limit_s > 0:
        parser.error(f"--time-limit-s {options.time_limit_s:g}: must be more than 0")
    if options.output.suffix != ".jsonl":
        # The table and the picture take its name with another suffix: they must not take its place.
        parser.error(f"--output {options.output}: the name of the rows must end in .jsonl")


def interrupt(number: int, frame: Any) -> None:
    """Take SIGTERM for an interruption: measured processes are stopped, and every finished run has been written."""
    raise KeyboardInterrupt
