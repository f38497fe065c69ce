"""Megatron's refusals of flags, as errors of one paragraph."""

import linecache
import re
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.patches.registry import PatchError

REFUSALS = (AssertionError, ArithmeticError, ImportError, NameError, OSError, RuntimeError, TypeError, ValueError)


@contextmanager
def told_refusals(*, in_full: bool) -> Iterator[None]:
    """Turn an exception by which Megatron refuses flags into a ``UsageError`` of one paragraph, unless ``in_full``."""
    try:
        yield
    except (SwapError, PatchError):
        raise
    except REFUSALS as error:
        if in_full:
            raise
        raise UsageError(
            f"Megatron refuses these flags: {_refusal(error)}\nChange the flags that it names. --swap-log-level debug "
            "shows the whole traceback."
        ) from error


def _refusal(error: Exception) -> str:
    """Return Megatron's words, or the failed condition with its values, and its place in the source."""
    frame, line_number = list(traceback.walk_tb(error.__traceback__))[-1]
    file = frame.f_code.co_filename
    line = linecache.getline(file, line_number).strip()
    parsed = vars(frame.f_locals.get("args", Namespace()))
    flags = {name: f"--{name.replace('_', '-')}" for name in re.findall(r"args\.(\w+)", line) if name in parsed}
    values = {flag: "" if parsed[name] is True else f" {parsed[name]}" for name, flag in flags.items()}
    given = sorted(flag + value for flag, value in values.items() if flag in sys.argv)
    # Megatron checks flags by assertions, some of which have no text.
    text = str(error).strip() or f"{line.removeprefix('assert ')} does not hold"
    where = f"{'/'.join(file.split('/')[-3:])}, line {line_number}"
    return f"{text} ({', '.join([*given, where])})"
