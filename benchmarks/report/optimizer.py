"""What moving an optimizer's state costs beside the same run in which it stays, and beside the link's own time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.report.flags import is_planned, recomputed_sites, swapped_layers, swaps_optimizer
from benchmarks.report.overhead import base_of
from benchmarks.report.tables import name
from benchmarks.report.text import Table, cell_gib, cell_ms, cell_number, cell_ratio
from benchmarks.rows import GIB, Row, peak_gib

SUITE = "h200-optimizer"


@dataclass(frozen=True)
class Moved:
    """A run whose optimizer state rests, and nothing else is swapped, beside its base.

    ``link_ms``: what the bytes of a step take, both directions busy, at the speed that was measured before the run.
    """

    row: Row
    base: Row
    link_ms: float

    @property
    def more_ms(self) -> float:
        return float(self.row["step_ms_median"] - self.base["step_ms_median"])


def moved(rows: Sequence[Row]) -> list[Moved]:
    """Of one case, those with a base of which it is known what moved, from the fewest bytes to the most."""
    found = []
    for row in rows:
        alone = swaps_optimizer(row) and not is_planned(row) and not swapped_layers(row) and not recomputed_sites(row)
        base, link = base_of(row, rows), row.get("link") or {}
        if alone and base is not None and row.get("optimizer_out_bytes") and "duplex_gb_s" in link:
            most_bytes = max(row["optimizer_out_bytes"], row["optimizer_in_bytes"])
            found.append(Moved(row, base, most_bytes / link["duplex_gb_s"] / 1e6))
    return sorted(found, key=lambda one: one.link_ms)


def table(cases: Mapping[str, Sequence[Moved]]) -> Table:
    head = [
        "shape", "run", "step ms", "unswapped", "longer by ms", "state out GiB a step", "link GB/s, both ways",
        "link ms", "longer by, × link ms", "peak falls by GiB", "tokens/s", "losses equal",
    ]  # fmt: skip
    lines = []
    for case, points in cases.items():
        for one in points:
            row, base = one.row, one.base
            peaks = peak_gib(base), peak_gib(row)
            lines.append([
                case, name(row), cell_ms(row["step_ms_median"]), cell_ms(base["step_ms_median"]), cell_ms(one.more_ms),
                cell_gib(row["optimizer_out_bytes"] / GIB), cell_ms(row["link"]["duplex_gb_s"]), cell_ms(one.link_ms),
                cell_ratio(one.more_ms / one.link_ms),
                cell_gib(None if peaks[0] is None or peaks[1] is None else peaks[0] - peaks[1]),
                cell_number(row["tokens_per_s"]), "yes" if row["losses_equal"] else "**no**",
            ])  # fmt: skip
    return Table(head, lines)
