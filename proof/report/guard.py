"""Runs for which the device was too small, without and with the out-of-memory guard."""

from __future__ import annotations

from collections.abc import Sequence

from proof.report.flags import is_guarded
from proof.report.tables import equal_runs
from proof.report.text import ABSENT, Table, cell_gib, cell_ms, cell_number
from proof.rows import GIB, Row, outcome


def guarded(rows: Sequence[Row]) -> list[Row]:
    """Those of cases in which one run has the guard."""
    cases = {(row["command"], row["case"]) for row in rows if is_guarded(row)}
    return [row for row in rows if (row["command"], row["case"]) in cases]


def table(rows: Sequence[Row]) -> Table:
    """Peaks are those of the rank that has most."""
    head = [
        "case", "GPUs", "flags", "outcome", "steps", "autograd held GiB", "of a device GiB", "rescues in step 1",
        "most in a later step", "all left the device with GiB", "first step s", "later steps ms", "equal",
    ]  # fmt: skip
    lines = []
    for run in equal_runs(rows):
        row = run.row
        rescues, num_steps = row.get("rescues_by_step") or (), len(row.get("losses") or ())
        first_ms = row.get("first_step_ms")
        lines.append([
            str(row["case"]), str(row.get("num_ranks") or 1), f"`--{row['method']}`",
            "trained to the end" if row["outcome"] == "ok" else outcome(row), str(num_steps or ABSENT),
            cell_gib(row.get("saved_peak_gib") or None), cell_gib(row["machine"]["device_memory_gib"]),
            str(rescues[0]) if rescues else ABSENT, str(max(rescues[1:])) if rescues[1:] else ABSENT,
            cell_gib(row["rescued_bytes"] / GIB if "rescued_bytes" in row else None),
            cell_number(first_ms / 1e3) if first_ms else ABSENT, cell_ms(row["step_ms_median"]),
            "reference" if run.is_reference else ("yes" if run.is_equal else "**no**") if run.is_compared else ABSENT,
        ])  # fmt: skip
    return Table(head, lines)
