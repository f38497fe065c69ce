"""The report's section on model-size sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report.pictures import Picture
from benchmarks.report.profiles import anchor
from benchmarks.report.text import Table
from benchmarks.rows import Row
from benchmarks.sweeps import table as sweep_table
from benchmarks.sweeps.axes import AXES
from benchmarks.sweeps.picture import draw
from benchmarks.sweeps.rows import check, is_sweep

COMMAND = "python tools/sweep.py --sweep h200-depth --output docs/results/h200-depth-sweep.jsonl"


@dataclass(frozen=True)
class SweepSection:
    """One sweep in the report."""

    name: str
    rows: list[Row]
    picture: Picture

    @property
    def axis(self) -> str:
        return str(self.rows[0]["axis"])

    @property
    def table(self) -> Table:
        return Table(list(sweep_table.HEAD), sweep_table.table(self.rows))

    @property
    def limits(self) -> list[tuple[str, str]]:
        """Return each method and what fills the device at its largest value."""
        return [(one.method, one.limit) for one in sweep_table.largest_by_method(self.rows) if one.limit]

    @property
    def physical_limit(self) -> str | None:
        """Return the limit of the machine, where the axis grows the number of parameters."""
        return sweep_table.machine_limit(self.rows).text if AXES[self.axis].grows else None


def split(files: Sequence[tuple[str, list[Row]]]) -> tuple[list[tuple[str, Row]], dict[str, list[Row]]]:
    """Split rows into those of no sweep, each with its file's name, and those of each sweep, by the sweep's name.

    Raises:
        RowError: a row of a sweep does not match its schema.
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


def build_sweeps(sweeps: dict[str, list[Row]], pictures: Path) -> list[SweepSection]:
    """Return the sweeps that were run, with their pictures."""
    return [SweepSection(name, rows, _picture(pictures, name, rows)) for name, rows in sweeps.items()]


def _picture(pictures: Path, name: str, rows: list[Row]) -> Picture:
    stops = [one.stopped_short for one in sweep_table.largest_by_method(rows)]
    shown = [sweep_table.table(rows), stops, asdict(sweep_table.machine_limit(rows))]
    return Picture(pictures / f"{anchor(f'{name} sweep')}.png", shown, lambda target: draw(rows, target))
