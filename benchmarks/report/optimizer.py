"""The cost of offloading optimizer state, compared with the unswapped run and with the link's own time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.flags import is_planned, recomputed_sites, swapped_layers, swaps_optimizer
from benchmarks.report.overhead import unswapped_run_of
from benchmarks.report.tables import name
from benchmarks.report.text import Table, cell_gib, cell_ms, cell_number, cell_ratio
from benchmarks.rows import GIB, Row, peak_gib

SUITE = "h200-optimizer"


@dataclass(frozen=True)
class Moved:
    """A run that offloads optimizer state and swaps nothing else, with its unswapped run.

    ``link_ms``: the time of a step's copies at the link speed that was measured with both directions busy.
    """

    row: Row
    unswapped: Row
    link_ms: float

    @property
    def more_ms(self) -> float:
        return float(self.row["step_ms_median"] - self.unswapped["step_ms_median"])


def moved(rows: Sequence[Row]) -> list[Moved]:
    """Return the runs of one case that offload only optimizer state, from the fewest bytes to the most.

    Runs without an unswapped run, counted bytes or a measured link speed are left out.
    """
    found = []
    for row in rows:
        is_alone = (
            swaps_optimizer(row) and not is_planned(row) and not swapped_layers(row) and not recomputed_sites(row)
        )
        unswapped, link = unswapped_run_of(row, rows), row.get("link") or {}
        if is_alone and unswapped is not None and row.get("optimizer_out_bytes") and "duplex_gb_s" in link:
            most_bytes = max(row["optimizer_out_bytes"], row["optimizer_in_bytes"])
            found.append(Moved(row, unswapped, most_bytes / link["duplex_gb_s"] / 1e6))
    return sorted(found, key=lambda one: one.link_ms)


def table(cases: Mapping[str, Sequence[Moved]]) -> Table:
    head = [
        "shape", "run", "step ms", "unswapped", "longer by ms", "state out GiB a step", "link GB/s, both ways",
        "link ms", "longer by, × link ms", "peak falls by GiB", "tokens/s", "losses equal",
    ]  # fmt: skip
    lines = []
    for case, points in cases.items():
        for one in points:
            row, unswapped = one.row, one.unswapped
            peaks = peak_gib(unswapped), peak_gib(row)
            lines.append([
                case, name(row), cell_ms(row["step_ms_median"]), cell_ms(unswapped["step_ms_median"]),
                cell_ms(one.more_ms),
                cell_gib(row["optimizer_out_bytes"] / GIB), cell_ms(row["link"]["duplex_gb_s"]), cell_ms(one.link_ms),
                cell_ratio(one.more_ms / one.link_ms),
                cell_gib(None if peaks[0] is None or peaks[1] is None else peaks[0] - peaks[1]),
                cell_number(row["tokens_per_s"]), "yes" if row["losses_equal"] else "**no**",
            ])  # fmt: skip
    return Table(head, lines)
