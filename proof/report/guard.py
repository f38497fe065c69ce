"""Runs for which the device was too small, without and with the out-of-memory guard."""

from __future__ import annotations

from collections.abc import Sequence

from proof.report.flags import is_guarded, training
from proof.report.text import ABSENT, Table, cell_gib, cell_ms, cell_number, listed
from proof.rows import GIB, Row, outcome


def guarded(rows: Sequence[Row]) -> list[Row]:
    """Those of cases in which one run has the guard; together those that train the same."""
    cases = {(row["command"], row["case"]) for row in rows if is_guarded(row)}
    found = [row for row in rows if (row["command"], row["case"]) in cases]
    order = list(dict.fromkeys(training(row) for row in found))
    return sorted(found, key=lambda row: order.index(training(row)))


def table(rows: Sequence[Row]) -> Table:
    """Rescues and bytes are those of all ranks, peaks of the rank that has most. Equal: to the first run that trains
    the same, of whichever command, as many steps as both made."""
    head = [
        "case", "GPUs", "flags", "another program holds GiB", "outcome", "steps", "autograd held GiB",
        "of a device GiB", "rescues", "in rank 0's step 1", "most in a step of it", "last in its step",
        "all left the device with GiB", "first step s", "later steps ms", "equal",
    ]  # fmt: skip
    lines = []
    references: dict[tuple[str, ...], Row] = {}
    for row in rows:
        rescues, num_steps = row.get("rescues_by_step") or (), len(row.get("losses") or ())
        first_ms = row.get("first_step_ms")
        trained = row["outcome"] == "ok"
        reference = references.get(training(row))
        if trained:
            references.setdefault(training(row), row)
        lines.append([
            str(row["case"]), str(row.get("num_ranks") or 1), f"`--{row['method']}`",
            listed([f"{gib:g}" for gib in row.get("held_gib") or ()]) or ABSENT,
            "trained to the end" if trained else outcome(row), str(num_steps or ABSENT),
            cell_gib(row.get("saved_peak_gib") or None), cell_gib(row["machine"]["device_memory_gib"]),
            cell_number(row.get("num_rescues")),
            *([str(rescues[0]), str(max(rescues))] if rescues else [ABSENT, ABSENT]),
            str(max((step for step, number in enumerate(rescues, 1) if number), default=ABSENT)),
            cell_gib(row["rescued_bytes"] / GIB if "rescued_bytes" in row else None),
            cell_number(first_ms / 1e3) if first_ms else ABSENT, cell_ms(row["step_ms_median"]),
            ABSENT if not trained else "reference" if reference is None else _equal(row, reference),
        ])  # fmt: skip
    return Table(head, lines)


def _equal(row: Row, reference: Row) -> str:
    """Losses and gradient norms of each step, and the final weights where both end with the same."""
    ours, theirs = ([*zip(one["losses"], one["grad_norms"], strict=True)] for one in (row, reference))
    num_steps = min(len(ours), len(theirs))
    is_equal = ours[:num_steps] == theirs[:num_steps]
    if len(ours) == len(theirs):
        return "yes" if is_equal and row["weights_sha256"] == reference["weights_sha256"] else "**no**"
    return f"yes, {num_steps} steps" if is_equal else "**no**"
