"""Format figures, and tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import Row

ABSENT = "–"
NUMERIC = re.compile(r"–|yes|\*\*no\*\*|not compared|[-+\d.,]+ ?%?(?: \([-\d.,–]+\))?")


@dataclass(frozen=True)
class Table:
    """A Markdown table; cells are strings as they are printed."""

    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """Return Markdown with number columns aligned right and the first column left."""
        sides = ["---", *("---:" if self._is_numeric(column) else "---" for column in range(1, len(self.head)))]
        lines = [self.head, sides, *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _is_numeric(self, column: int) -> bool:
        return all(NUMERIC.fullmatch(row[column]) is not None for row in self.rows)


def cell_ms(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}"


def cell_gib(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def cell_ratio(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"


def cell_share(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f} %"


def cell_signed_share(value: float | None) -> str:
    """Format a fraction as a percentage with its sign."""
    return ABSENT if value is None else f"{100 * value:+.1f} %"


def cell_number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f}"


def cell_spread(row: Row) -> str:
    """Format the step times of a row: median (least–most), in ms."""
    times = row["step_ms_all"]
    return f"{cell_ms(row['step_ms_median'])} ({min(times):.1f}–{max(times):.1f})"


def listed(words: Sequence[str]) -> str:
    """Join words as in ``a, b and c``."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)
