"""The largest model by method: sweeps as the template shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from proof.report.pictures import Picture
from proof.report.profiles import anchor
from proof.report.text import Table
from proof.rows import Row
from proof.sweep import found
from proof.sweep.axes import AXES
from proof.sweep.picture import draw
from proof.sweep.rows import check, is_sweep

COMMAND = "python tools/sweep.py --sweep h200-depth --output docs/results/h200-depth-sweep.jsonl"


@dataclass(frozen=True)
class SweepResults:
    """One sweep that was run."""

    name: str
    rows: list[Row]
    picture: Picture

    @property
    def axis(self) -> str:
        return str(self.rows[0]["axis"])

    @property
    def table(self) -> Table:
        return Table(list(found.HEAD), found.table(self.rows))

    @property
    def limits(self) -> list[tuple[str, str]]:
        """Each method, and what fills the device at its largest."""
        return [(one.method, one.limit) for one in found.found_in(self.rows) if one.limit]

    @property
    def physical_limit(self) -> str | None:
        """Where the number of parameters grows."""
        return found.limit_of(self.rows).text if AXES[self.axis].grows else None

    @property
    def short(self) -> list[str]:
        """Of ours and of the others the one that got furthest."""
        still_open = [one.method for one in found.found_in(self.rows) if one.is_open]
        return [
            f"`{row['method']}` {row['case']} ({found.short(found.params_of(row))}, "
            f"{row['tokens_per_s']:,.0f} tokens/s{'; nothing larger was tried' if row['method'] in still_open else ''})"
            for row in found.champions(self.rows)
        ]


def split(files: Sequence[tuple[str, list[Row]]]) -> tuple[list[tuple[str, Row]], dict[str, list[Row]]]:
    """Rows that are of no sweep, each with its file's name, and those of each sweep, by its name.

    Raises:
        RowError: a row of a sweep does not keep to its schema.
    """
    others: list[tuple[str, Row]] = []
    sweeps: dict[str, list[Row]] = {}
    for name, rows in files:
        for row in rows:
            if is_sweep(row):
                check(row, name)
                sweeps.setdefault(row["suite"], []).append(row)
            else:
                others.append((name, row))
    return others, sweeps


def build_sweeps(sweeps: dict[str, list[Row]], pictures: Path) -> list[SweepResults]:
    """Those that were run, with their pictures."""
    return [SweepResults(name, rows, _picture(pictures, name, rows)) for name, rows in sweeps.items()]


def _picture(pictures: Path, name: str, rows: list[Row]) -> Picture:
    shown = [found.table(rows), [one.stopped_short for one in found.found_in(rows)], asdict(found.limit_of(rows))]
    return Picture(pictures / f"{anchor(f'{name} sweep')}.png", shown, lambda target: draw(rows, target))
