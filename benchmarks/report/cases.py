"""Cases, suites and sweeps, as the pages show them."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import names
from benchmarks.flags import added, shape
from benchmarks.pictures import Picture
from benchmarks.report.profiles import anchor
from benchmarks.rows import Row
from benchmarks.suites import losses
from benchmarks.sweeps import table as sweep_table
from benchmarks.sweeps.picture import draw
from benchmarks.table import Table, listed


@dataclass
class Case:
    name: str
    rows: list[Row]
    picture: Picture | None

    @property
    def title(self) -> str:
        return names.model(next((row for row in self.rows if row["num_params"]), self.rows[0]))

    @property
    def conditions(self) -> Iterator[str]:
        first, sizes = self.rows[0], shape(self.rows[0])
        rounds = max((row.get("num_rounds") or 1 for row in self.rows), default=1)
        yield (
            f"{sizes.num_layers} layers, hidden size {sizes.hidden_size}, sequence {sizes.sequence}, micro-batch "
            f"{sizes.micro_batch}, {sizes.num_micro_batches} micro-batches per step; rounds: {rounds}."
        )
        if first.get("peak") == "reserved":
            yield "The peak is the allocator's reserved memory."
        if schedule := first.get("sequence_schedule"):
            parts = [f"{num_steps} steps of {length} tokens" for num_steps, length in schedule]
            yield f"The sequence length changes: {listed(parts)}, repeatedly."
        if "--swap-deterministic" in first["flags"].split():
            yield "All kernels are deterministic, so that losses can be bit-identical."

    @property
    def flagged(self) -> list[Row]:
        noise = losses.loss_noise(self.rows)
        return [row for row in self.rows if losses.is_beyond_noise(row, noise)]

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row["outcome"] == "refused"]


@dataclass
class Suite:
    name: str
    cases: list[Case]

    def legend(self) -> list[tuple[str, str, str, str]]:
        """Return name, description, added flags and case (empty if the flags are the same in all) of each method."""
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for case in self.cases:
            others = [row for row in case.rows if row["method"] == "none"] or case.rows
            for row in case.rows:
                more = added(row, others) if len(case.rows) > 1 else row["flags"]
                found.setdefault(row["method"], {}).setdefault(more, (row.get("what") or "", case.name))
        return [
            (method, what, more, case if len(by_flags) > 1 else "")
            for method, by_flags in found.items()
            for more, (what, case) in by_flags.items()
        ]


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
