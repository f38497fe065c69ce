"""Options, errors and exit statuses that the programs with a result file share."""

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.rows import RowError
from benchmarks.runner.memory_hog import MemoryHogError
from benchmarks.store import StoreError
from megatron.swap.common.flags import CommandLine
from megatron.swap.common.types import UsageError

RUNS = ROOT / "runs"  # The folder of result files without `--output`; git ignores it
RUNS_LEFT, INTERRUPTED = 75, 130  # Exit statuses: runs are left at the time limit; the program was interrupted


class ChoiceError(ValueError):
    """A request, of the command line or a file, that cannot be run; the message says why."""


def new_parser(text: str | None) -> CommandLine:
    return CommandLine(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_options(parser: argparse.ArgumentParser, *, default: str, row: str) -> None:
    where = f"result file, one row per {row} (default: {_short(RUNS)}/{default})"
    parser.add_argument("--output", type=Path, help=where)
    parser.add_argument("--resume", action="store_true", help="continue the output file: skip the runs in it")
    parser.add_argument("--time-limit-s", type=float, help="start no run that may not end within this time")


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace, default: str) -> None:
    options.output = Path(_short(RUNS / default)) if options.output is None else options.output
    if options.time_limit_s is not None and not options.time_limit_s > 0:
        parser.error(f"--time-limit-s {options.time_limit_s:g}: must be more than 0")
    if options.output.suffix != ".jsonl":
        # Table and picture have the same name with other suffixes, and must not overwrite the rows.
        parser.error(f"--output {options.output}: the name of the rows must end in .jsonl")


def guarded(action: Callable[[], int]) -> int:
    """Return the exit status of `action`. An error is printed as one line. SIGTERM works like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return action()
    except (ChoiceError, RowError, StoreError, UsageError, MemoryHogError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: finished runs are kept, continue with --resume", flush=True)
        return INTERRUPTED
