"""What a row's flags say: the shape that was trained, and what was swapped or recomputed."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import Row, RowError
from benchmarks.runner.planning import plan_file, searches

RECOMPUTES, OFFLOADS, KEEPS = "recomputes", "offloads", "keeps"
"""What a method does with the memory that it saves; ``KEEPS``: nothing, it saves none."""


@dataclass(frozen=True)
class Shape:
    """The model and the batch of a run."""

    num_layers: int
    hidden_size: int
    sequence: int
    micro_batch: int
    num_micro_batches: int
    """A step, for each data-parallel rank when there is one."""


def value(row: Row, flag: str) -> str | None:
    """The last value of a flag, as Megatron's parser takes it."""
    words = shlex.split(row["flags"])
    found = [after for word, after in itertools.pairwise(words) if word == flag]
    return found[-1] if found else None


def shape(row: Row) -> Shape:
    """Raises: RowError, naming the row and the flag that its flags lack."""

    def number(flag: str) -> int:
        found = value(row, flag)
        if found is None:
            raise RowError(f"{row['suite']}, {row['case']}, {row['method']}: the row's flags have no {flag}")
        return int(found)

    micro_batch = number("--micro-batch-size")
    return Shape(
        num_layers=number("--num-layers"),
        hidden_size=number("--hidden-size"),
        sequence=number("--seq-length"),
        micro_batch=micro_batch,
        num_micro_batches=number("--global-batch-size") // micro_batch,
    )


def swapped_layers(row: Row) -> str | None:
    """What ``--swap-layers`` asked for; ``None``: nothing."""
    layers = value(row, "--swap-layers")
    return None if layers == "none" else layers


def swapped_modules(row: Row) -> str | None:
    """What ``--swap-modules`` limited swapping to; ``None``: whole layers."""
    return _words_after(row, "--swap-modules")


def recomputed_sites(row: Row) -> str | None:
    """What ``--swap-recompute`` computes again instead of keeping it; ``None``: nothing."""
    return _words_after(row, "--swap-recompute")


def _words_after(row: Row, flag: str) -> str | None:
    words = shlex.split(row["flags"])
    if flag not in words:
        return None
    rest = words[words.index(flag) + 1 :]
    return " ".join(itertools.takewhile(lambda word: not word.startswith("--"), rest))


def is_planned(row: Row) -> bool:
    """It obeys a plan, its own or one out of a file."""
    words = tuple(shlex.split(row["flags"]))
    return searches(words) or plan_file(words) is not None


def swaps_optimizer(row: Row) -> bool:
    """Whether optimizer state is offloaded to host memory or disk."""
    part = value(row, "--swap-optimizer") or "0"
    return part == "auto" or float(part) > 0


def is_guarded(row: Row) -> bool:
    """Saved tensors leave the device when an allocation there fails."""
    return "--swap-oom-guard" in shlex.split(row["flags"])


def is_ours(row: Row) -> bool:
    acts = swapped_layers(row) is not None or recomputed_sites(row) is not None or is_planned(row)
    return acts or swaps_optimizer(row) or is_guarded(row)


def without_swap(row: Row) -> tuple[str, ...]:
    """The flags of the same run without swapping."""
    words: list[str] = []
    is_swap = False
    for word in shlex.split(row["flags"]):
        if word.startswith("--"):
            is_swap = word.startswith("--swap-")
        if not is_swap:
            words.append(word)
    return tuple(words)


def without_guard(row: Row) -> list[str]:
    """The flags of the same run without the out-of-memory guard, and without saying that nothing is swapped."""
    words = [word for word in row["flags"].split() if word != "--swap-oom-guard"]
    pairs = [*itertools.pairwise([*words, ""])]
    nothing = [at for at, pair in enumerate(pairs) if pair == ("--swap-layers", "none")]
    return [word for at, word in enumerate(words) if at not in nothing and at - 1 not in nothing]


def training(row: Row) -> tuple[str, ...]:
    """What is trained, with whatever swapped: rows that agree make the same steps, as many as both make."""
    words = without_swap(row)
    if value(row, "--lr-decay-style") == "constant" and "--train-iters" in words:  # else the length tells the rate
        length = words.index("--train-iters")
        words = words[:length] + words[length + 2 :]
    versions = (f"{name} {version}" for name, version in sorted(row["versions"].items()))
    return (*versions, row["machine"]["gpu"], str(row["case"]), str(row.get("num_ranks") or 1), *words)


def added(row: Row, others: Sequence[Row]) -> str:
    """The flags that a run has beyond those that it begins with like all of ``others``."""
    words = shlex.split(row["flags"])
    together = zip(words, *(shlex.split(other["flags"]) for other in others), strict=False)
    start = sum(1 for _ in itertools.takewhile(lambda places: len(set(places)) == 1, together))
    while 0 < start < len(words) and not words[start].startswith("--"):  # a value of a flag that all have
        start -= 1
    return shlex.join(words[start:])


def means(row: Row) -> set[str]:
    """By which means the method saves memory, swapping of ours aside."""
    words = shlex.split(row["flags"])
    wrap = row.get("wrap") or ""
    found = set()
    if "--recompute-granularity" in words or "checkpoint" in wrap:
        found.add(RECOMPUTES)
    offloads = ("--fine-grained-activation-offloading", "--cpu-offloading-num-layers", "--optimizer-cpu-offload")
    if any(flag in words for flag in offloads) or wrap:
        found.add(OFFLOADS)
    return found or {KEEPS}
