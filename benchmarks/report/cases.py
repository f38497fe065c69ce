"""The cases and suites of the benchmarks, as the pages show them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import names
from benchmarks.flags import KEEPS, added, is_ours, means, shape
from benchmarks.report import compare, overhead, planner, tables, text
from benchmarks.report.pictures import Picture
from benchmarks.rows import Row
from benchmarks.suites import losses


@dataclass
class Case:
    """One case of a benchmark suite, as the template shows it."""

    name: str
    rows: list[Row]
    picture: Picture | None
    unmeasured: list[str]
    """Methods of the suite that have no row in this case."""

    @property
    def shape(self) -> Any:
        return shape(self.rows[0])

    @property
    def num_rounds(self) -> int:
        return max((row.get("num_rounds") or 1 for row in self.rows), default=1)

    @property
    def has_rounds(self) -> bool:
        return self.num_rounds > 1

    @property
    def conditions(self) -> list[str]:
        """Return sentences about what is special in this case's runs."""
        found = []
        if self.rows[0].get("peak") == "reserved":
            found.append("The peak is the allocator's reserved memory.")
        if schedule := self.rows[0].get("sequence_schedule"):
            parts = [f"{num_steps} steps of {length} tokens" for num_steps, length in schedule]
            found.append(f"The sequence length changes: {text.listed(parts)}, repeatedly.")
        if "--swap-deterministic" in self.rows[0]["flags"].split():
            found.append("All kernels are deterministic, so that losses can be bit-identical.")
        return found

    @property
    def unswapped(self) -> Row | None:
        return next((row for row in self.rows if row["method"] == "none"), None)

    @property
    def title(self) -> str:
        """Return the model for people: ``3.5B, 4k tokens``."""
        counted = next((row for row in self.rows if row["num_params"]), self.rows[0])
        return names.model(counted)

    @property
    def frontier_names(self) -> list[str]:
        return [tables.name(row) for row in compare.on_frontier(self.rows)]

    @property
    def flagged(self) -> list[Row]:
        """Return the methods whose losses differ by more than noise."""
        noise = losses.loss_noise(self.rows)
        return [row for row in self.rows if losses.is_beyond_noise(row, noise)]

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row["outcome"] == "refused"]

    @property
    def loss_noise(self) -> str:
        """Return where the noise estimate for the losses comes from."""
        if losses.loss_noise(self.rows) is None:
            return "too few methods ran to estimate the noise"
        own = [row for row in self.rows if row["method"] in (row.get("reference"), losses.REPEAT)]
        if any(row.get("loss_max_rel_diff") for row in own):
            return "the noise is the difference between repeated runs of the reference"
        return "the reference ran once, so the noise is the median of these differences"

    repeats = property(lambda self: compare.repeats(self.rows))
    methods_table = property(lambda self: tables.methods_table(self.rows))
    has_peers = property(lambda self: any(not is_ours(row) and KEEPS not in means(row) for row in self.rows))
    duels = property(lambda self: compare.duels(self.rows) if self.has_peers else [])
    duels_table = property(lambda self: tables.duels_table(self.duels))
    reserved_duels_table = property(
        lambda self: tables.duels_table(compare.duels(self.rows, compare.RESERVED), compare.RESERVED)
    )
    counts_reserved = property(lambda self: self.rows[0].get("peak") == "reserved")
    planned = property(lambda self: planner.points(self.rows))
    planned_table = property(lambda self: planner.points_table(self.planned, self.rows))
    planned_failed = property(lambda self: planner.failed(self.rows))
    losses = property(lambda self: compare.losses(self.rows))
    ladder = property(lambda self: overhead.ladder(self.rows))


@dataclass
class Suite:
    """A benchmark suite; without cases it has not been measured yet."""

    name: str
    command: str
    cases: list[Case]
    unmeasured: list[str]
    """Cases of the suite's file that have no row."""

    def legend(self) -> list[tuple[str, str, str, str]]:
        """Return name, description, added flags and case of each method.

        The case is empty, and the method listed once, where the flags are the same in every case.
        """
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for case in self.cases:
            others = [case.unswapped] if case.unswapped else case.rows
            for row in case.rows:
                more = added(row, others) if len(case.rows) > 1 else row["flags"]
                found.setdefault(row["method"], {}).setdefault(more, (row.get("what") or "", case.name))
        return [
            (method, what, more, case if len(by_flags) > 1 else "")
            for method, by_flags in found.items()
            for more, (what, case) in by_flags.items()
        ]
