"""Lines that a run prints while it trains, and the error where Megatron refuses flags."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.swap.common.types import SwapError, UsageError


class Console:
    """Lines on standard output, unless ``--swap-log-level quiet``.

    Args:
        log_level: one of ``LOG_LEVELS``.
        rank: of this process in the run.
        world_size: number of ranks.
    """

    def __init__(self, log_level: str, rank: int, world_size: int) -> None:
        self.is_quiet = log_level == "quiet"
        self.rank = rank
        self._of_rank = f" (rank {rank})" if world_size > 1 else ""

    @property
    def is_first(self) -> bool:
        """Whether this rank prints the lines that are the same on all ranks."""
        return self.rank == 0 and not self.is_quiet

    def say(self, line: str) -> None:
        """Print a line that is the same on all ranks, on the first rank only."""
        if self.is_first:
            print(f" swap: {line}", flush=True)

    def say_here(self, lines: Sequence[str]) -> None:
        """Print lines about this rank."""
        for line in () if self.is_quiet else lines:
            print(f" swap{self._of_rank}: {line}", flush=True)


@contextmanager
def told_refusals(*, in_full: bool) -> Iterator[None]:
    """Turn an exception by which Megatron refuses flags into an error of one paragraph.

    Megatron checks flags by assertions, of which some say nothing: then the condition is told.

    Args:
        in_full: leave Megatron's exception as it is, to be told with its traceback.

    Raises:
        UsageError: Megatron refused the flags.
    """
    try:
        yield
    except SwapError:
        raise
    except (AssertionError, ArithmeticError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        if in_full:
            raise
        raise UsageError(
            f"Megatron refuses these flags: {_refusal(error)}\nChange the flags that it names. --swap-log-level debug "
            "shows the whole traceback."
        ) from error


def _refusal(error: Exception) -> str:
    """Return what Megatron says, or the condition that does not hold with the values in it; and where it is checked."""
    frame, line_number = list(traceback.walk_tb(error.__traceback__))[-1]
    file = frame.f_code.co_filename
    line = linecache.getline(file, line_number).strip()
    parsed = vars(frame.f_locals.get("args", Namespace()))
    flags = {name: f"--{name.replace('_', '-')}" for name in re.findall(r"args\.(\w+)", line) if name in parsed}
    values = {flag: "" if parsed[name] is True else f" {parsed[name]}" for name, flag in flags.items()}
    given = sorted(flag + value for flag, value in values.items() if flag in sys.argv)
    text = str(error).strip() or f"{line.removeprefix('assert ')} does not hold"
    where = f"{'/'.join(file.split('/')[-3:])}, line {line_number}"
    return f"{text} ({', '.join([*given, where])})"
