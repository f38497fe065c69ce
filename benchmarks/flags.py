"""Read a row's flags: the shape that was trained, and what was swapped or recomputed."""

import functools
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import Row, RowError
from benchmarks.runner.planning import last_value, plan_file, searches


@dataclass(frozen=True)
class Shape:
    num_layers: int
    hidden_size: int
    sequence: int
    micro_batch: int
    num_micro_batches: int  # Per step, on a single data-parallel rank


@functools.cache
def _words(flags: str) -> tuple[str, ...]:
    """Return the words of ``flags``. They are kept: a report asks for the same rows thousands of times."""
    return tuple(shlex.split(flags))


def value(row: Row, flag: str) -> str | None:
    """Return the last value of a flag, which is the one that Megatron's parser takes."""
    return last_value(_words(row["flags"]), flag)


def shape(row: Row) -> Shape:
    def number(flag: str) -> int:
        found = value(row, flag)
        if found is None:
            raise RowError(f"{row['suite']}, {row['case']}, {row['method']}: the row's flags have no {flag}")
        return int(found)

    micro_batch = number("--micro-batch-size")
    return Shape(
        num_layers=number("--num-layers"), hidden_size=number("--hidden-size"), sequence=number("--seq-length"),
        micro_batch=micro_batch, num_micro_batches=number("--global-batch-size") // micro_batch,
    )  # fmt: skip


def swapped_layers(row: Row) -> str | None:
    layers = value(row, "--swap-layers")
    return None if layers == "none" else layers


def words_after(row: Row, flag: str) -> str | None:
    words = _words(row["flags"])
    if flag not in words:
        return None
    rest = words[words.index(flag) + 1 :]
    return " ".join(itertools.takewhile(lambda word: not word.startswith("--"), rest))


def is_planned(row: Row) -> bool:
    words = _words(row["flags"])
    return searches(words) or plan_file(words) is not None


def is_guarded(row: Row) -> bool:
    return "--swap-oom-guard" in _words(row["flags"])


def is_ours(row: Row) -> bool:
    recomputes = words_after(row, "--swap-recompute") is not None
    has_activation_plan = recomputes or swapped_layers(row) is not None or is_planned(row)
    state = value(row, "--swap-optimizer") or "0"
    swaps_optimizer = state == "auto" or float(state) > 0
    return has_activation_plan or swaps_optimizer or is_guarded(row)


def training(row: Row) -> tuple[str, ...]:
    """Return a key of what is trained, whatever is swapped: rows with equal keys compute the same steps."""
    words: list[str] = []
    is_swap = False
    for word in _words(row["flags"]):
        is_swap = word.startswith("--swap-") or (is_swap and not word.startswith("--"))
        words += [] if is_swap else [word]
    # With other schedules the learning rate depends on the number of steps.
    if value(row, "--lr-decay-style") == "constant" and "--train-iters" in words:
        length = words.index("--train-iters")
        words = words[:length] + words[length + 2 :]
    versions = (f"{name} {version}" for name, version in sorted(row["versions"].items()))
    return (*versions, row["machine"]["gpu"], str(row["case"]), str(row.get("num_ranks") or 1), *words)


def added(row: Row, others: Sequence[Row]) -> str:
    """Return the run's flags without the leading ones that it shares with all of ``others``."""
    words = _words(row["flags"])
    together = zip(words, *(_words(other["flags"]) for other in others), strict=False)
    start = sum(1 for _ in itertools.takewhile(lambda places: len(set(places)) == 1, together))
    while 0 < start < len(words) and not words[start].startswith("--"):  # a value of a flag that all have
        start -= 1
    return shlex.join(words[start:])
