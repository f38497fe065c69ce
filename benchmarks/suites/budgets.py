"""Budgets relative to the memory of a case's unswapped run: ``static+24``, ``static+60%``."""

import math
import re
from dataclasses import dataclass

from benchmarks.runner.request import NotReady

BUDGET = re.compile(r"static\+(?P<number>\d+(?:\.\d+)?)(?P<percent>%?)")
FLAG = "--swap-memory-gib"
DIGITS = 6


@dataclass(frozen=True)
class Memory:
    """Peak memory of a case's unswapped run, in GiB."""

    static_gib: float  # Weights, gradients and optimizer state
    activations_gib: float  # The allocated peak beyond `static_gib`


def is_relative(word: str) -> bool:
    return word.startswith("static")


def check(word: str) -> None:
    if BUDGET.fullmatch(word) is None:
        raise ValueError(
            f"{FLAG} {word}: a number of GiB is expected, or 'static+24' (GiB beyond weights, gradients and "
            "optimizer), or 'static+60%' (of the unswapped activations)"
        )


def resolved(flags: tuple[str, ...], memory: Memory | None, reference: str) -> tuple[str, ...]:
    """Replace relative budgets in the flags by GiB, rounded down. ``memory``: that of the method ``reference``."""
    words = []
    for word in flags:
        found = BUDGET.fullmatch(word)
        if found is not None and memory is None:
            raise NotReady(
                f"{FLAG} {word} is relative to the method {reference!r} of this case, which was not measured: run it "
                "first, into the same --output, or give a number of GiB"
            )
        if found is not None and memory is not None:
            more = float(found["number"]) * (memory.activations_gib / 100 if found["percent"] else 1)
            word = f"{math.floor((memory.static_gib + more) * 10**DIGITS) / 10**DIGITS:.{DIGITS}f}"
        words.append(word)
    return tuple(words)
