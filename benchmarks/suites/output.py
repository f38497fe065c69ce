"""Options and exit statuses that the programs with a result file share."""

from __future__ import annotations

import argparse
from typing import Any

RUNS_LEFT, INTERRUPTED = 75, 130
"""Exit statuses: runs are left at the time limit; the program was interrupted."""


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Check `--time-limit-s` and `--output`; end the program where they are wrong."""
    if options.time_limit_s is not None and not options.time_limit_s > 0:
        parser.error(f"--time-limit-s {options.time_limit_s:g}: must be more than 0")
    if options.output.suffix != ".jsonl":
        # Table and picture have the same name with other suffixes, and must not overwrite the rows.
        parser.error(f"--output {options.output}: the name of the rows must end in .jsonl")


def interrupt(number: int, frame: Any) -> None:
    """Handle SIGTERM like Ctrl-C: measured processes are stopped; finished runs are already written."""
    raise KeyboardInterrupt
