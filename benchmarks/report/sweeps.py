"""The report's section on model-size sweeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.pictures import Picture
from benchmarks.report.profiles import anchor
from benchmarks.rows import Row
from benchmarks.sweeps import table as sweep_table
from benchmarks.sweeps.picture import draw
from benchmarks.table import Table


@dataclass(frozen=True)
class SweepSection:
    """One sweep in the report. ``folder``: of the picture."""

    name: str
    rows: list[Row]
    folder: Path

    @property
    def axis(self) -> str:
        return str(self.rows[0]["axis"])

    @property
    def table(self) -> Table:
        return sweep_table.table(self.rows)

    @property
    def picture(self) -> Picture:
        stops = [one.stopped_short for one in sweep_table.largest_by_method(self.rows)]
        shown = [self.table.rows, stops, asdict(sweep_table.machine_limit(self.rows))]
        return Picture(self.folder / f"{anchor(f'{self.name} sweep')}.png", shown, lambda: draw(self.rows))
