"""Tables in Markdown, and the figures in their cells."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

ABSENT = "–"
NUMERIC = re.compile(r"–|yes|\*\*no\*\*|not compared|[-+\d.,]+ ?%?(?: \([-\d.,–]+\))?")


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]

    @staticmethod
    def of(items: Iterable[Any], columns: Mapping[str, Callable[[Any], object]]) -> Table:
        return Table([*columns], [[_text(value(item)) for value in columns.values()] for item in items])

    def __str__(self) -> str:
        """Return Markdown with number columns aligned right and the first column left."""
        columns = [[row[column] for row in self.rows] for column in range(1, len(self.head))]
        sides = ["---", *("---:" if all(map(NUMERIC.fullmatch, column)) else "---" for column in columns)]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.head, sides, *self.rows])

    def without_empty_columns(self) -> Table:
        filled = [column for column in range(len(self.head)) if any(row[column] for row in self.rows)]
        head, *rows = ([line[column] for column in filled] for line in [self.head, *self.rows])
        return Table(head, rows)

    @property
    def aligned(self) -> str:
        lines = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)


def _text(value: object) -> str:
    return ABSENT if value is None else str(value)


def cell(value: float | None, form: str) -> str:
    """Format a figure; a percentage gets a space before its sign."""
    return ABSENT if value is None else format(value, form).replace("%", " %")


cell_ms = partial(cell, form=".1f")
cell_gib = partial(cell, form=".2f")
cell_ratio = partial(cell, form=".3f")
cell_share = partial(cell, form=".1%")
cell_signed_share = partial(cell, form="+.1%")
cell_number = partial(cell, form=",.0f")


def listed(words: Sequence[str]) -> str:
    """Join words as in ``a, b and c``."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
