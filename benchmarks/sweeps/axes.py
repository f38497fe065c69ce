"""Axes of a sweep: values in rising order, and the training flags of each."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.suites.toml_file import SuiteError, Table, number
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.shape import params_of_rank

FFN_RATIO = 4.0


@dataclass(frozen=True)
class Value:
    label: str
    number: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    unit: str
    grows: bool
    read: Callable[[Table], list[Value]]


def _numbered(label: str, *flags: str) -> Callable[[Table], list[Value]]:
    def read(table: Table) -> list[Value]:
        return [
            Value(label.format(found), found, tuple(word for flag in flags for word in (flag, str(found))))
            for found in _numbers(table)
        ]

    return read


def _width(table: Table) -> list[Value]:
    """Read hidden sizes; heads have one size, and the feed-forward size is rounded to ``ffn_multiple``."""
    head, multiple = (table.take(f"{key}", int, default, least=1) for key, default in
                      (("head_size", 128), ("ffn_multiple", 256)))  # fmt: skip
    ratio = table.take("ffn_ratio", float, default=FFN_RATIO)
    found = []
    for hidden in _numbers(table):
        if hidden % head:
            raise SuiteError(f"{table.path}: hidden size {hidden}: must be a multiple of head_size, {head}")
        ffn = max(1, round(hidden * ratio / multiple)) * multiple
        flags = f"--hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {hidden // head}"
        found.append(Value(f"hidden size {hidden}", hidden, tuple(flags.split())))
    return found


def _family(table: Table) -> list[Value]:
    shapes = table.table("family")
    texts = {name: shapes.take(name, str) for name in shapes.content}
    return [Value(name, place, tuple(shlex.split(text))) for place, (name, text) in enumerate(texts.items(), 1)]


AXES = {
    "depth": Axis("layers", True, _numbered("{} layers", "--num-layers")),
    "width": Axis("hidden size", True, _width),
    "family": Axis("shape", True, _family),
    "sequence": Axis("tokens", False, _numbered("{} tokens", "--seq-length", "--max-position-embeddings")),
    "micro-batch": Axis("sequences", False, _numbered("micro-batch {}", "--micro-batch-size")),
}


def read_values(name: str, table: Table, flags: tuple[str, ...], micro_batches: int) -> list[Value]:
    values = []
    before: tuple[str, float] | None = None
    for value in AXES[name].read(table):
        where = f"{table.path}: {value.label}"
        words = (*flags, *value.flags)
        words = (*words, "--global-batch-size", str(micro_batches * number(where, words, "--micro-batch-size")))
        measure = num_params(words, where) if AXES[name].grows else float(value.number)
        if before is not None and measure <= before[1]:
            raise SuiteError(f"{where}: is no larger than {before[0]}; values must grow from first to last")
        before = value.label, measure
        values.append(replace(value, flags=words))
    if not values:
        raise SuiteError(f"{table.path}: axis {name} has no values")
    return values


def num_params(flags: tuple[str, ...], where: str) -> int:
    try:
        training = read_flags(flags)
        return round(params_of_rank(training.model, training.tied))
    except UsageError as error:
        raise SuiteError(f"{where}: {error}") from error


def _numbers(table: Table) -> list[int]:
    """Read ``values = [...]``, or ``first``, ``last`` and ``step`` (the distance) or ``factor``."""
    if "values" in table.content:
        values = table.take("values", list)
        if not all(type(value) is int and value >= 1 for value in values):
            raise SuiteError(f"{table.path}: values = {values!r}; expected: whole numbers from 1 on")
        return list(values)
    first, last = (table.take(key, int, least=1) for key in ("first", "last"))
    factor = table.take("factor", int, default=1, least=2)
    step = 0 if factor > 1 else table.take("step", int, least=1)
    if last < first:
        raise SuiteError(f"{table.path}: last = {last}; at least first, {first}")
    found = [first]
    while (following := found[-1] * factor + step) <= last:
        found.append(following)
    return found
