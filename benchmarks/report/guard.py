"""The out-of-memory guard: runs for which the device is too small, and its cost where it is never needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.flags import is_guarded, training, without_guard
from benchmarks.report.text import ABSENT, Table, cell_gib, cell_ms, cell_number, cell_ratio, cell_share, listed
from benchmarks.rows import COMPLETE, GIB, Row, outcome

COMPARED = ("losses", "grad_norms")


class Case(Protocol):
    """A case of a benchmark."""

    name: str
    rows: list[Row]


def guarded(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of cases in which some run has the guard, grouped by what they train."""
    cases = {(row["command"], row["case"]) for row in rows if is_guarded(row)}
    found = [row for row in rows if (row["command"], row["case"]) in cases]
    order = list(dict.fromkeys(training(row) for row in found))
    return sorted(found, key=lambda row: order.index(training(row)))


def table(rows: Sequence[Row]) -> Table:
    """Build the table of guarded runs.

    Rescues and bytes are summed over ranks; peaks are those of the highest rank. A run is compared with the first run
    that trains the same, in any command, over the steps that both made.
    """
    head = [
        "case", "GPUs", "flags", "held by another program GiB", "outcome", "steps", "saved tensors GiB", "device GiB",
        "rescues", "in step 1 (rank 0)", "most in one step (rank 0)", "last step with one (rank 0)",
        "rescued GiB", "first step s", "later steps ms", "median of", "equal",
    ]  # fmt: skip
    lines = []
    references: dict[tuple[str, ...], Row] = {}
    for row in rows:
        rescues, num_steps = row.get("rescues_by_step") or (), len(row.get("losses") or ())
        rescued_bytes, first_ms = row.get("rescued_bytes"), row.get("first_step_ms")
        trained = row["outcome"] in COMPLETE
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
            cell_gib(None if rescued_bytes is None else rescued_bytes / GIB),
            cell_number(first_ms / 1e3) if first_ms else ABSENT, cell_ms(row["step_ms_median"]),
            str(len(row["step_ms_all"] or ()) or ABSENT),
            ABSENT if not trained else "reference" if reference is None else _equal(row, reference),
        ])  # fmt: skip
    return Table(head, lines)


def _equal(row: Row, reference: Row) -> str:
    """Compare losses and gradient norms of each step, and the final weights where both end with the same step."""
    ours, theirs = ([one.get(field) or [] for field in COMPARED] for one in (row, reference))
    lengths = {len(values) for values in (*ours, *theirs)}
    num_steps = min(lengths)
    if not num_steps:
        return ABSENT
    if any(mine[:num_steps] != others[:num_steps] for mine, others in zip(ours, theirs, strict=True)):
        return "**no**"
    weights = [one.get("weights_sha256") for one in (row, reference)]
    if len(lengths) > 1 or None in weights:
        return f"yes, {num_steps} steps"
    return "yes" if weights[0] == weights[1] else "**no**"


def costs(cases: Sequence[Case]) -> Table | None:
    """Build the table of runs with the guard and the same runs without it, of the same case and file."""
    head = ["case", "without", "ms", "with the guard", "ms", "×", "rounds differ by"]
    lines = []
    for case in cases:
        measured = [row for row in case.rows if row["step_ms_median"]]
        for row in filter(is_guarded, measured):
            without = next((other for other in measured if other["flags"].split() == without_guard(row)), None)
            if without is None:
                continue
            pair = [without, row]
            differs = [
                max(rounds) / min(rounds) - 1 for one in pair if len(rounds := one.get("step_ms_rounds") or ()) > 1
            ]
            lines.append([
                f"{case.name} ({row['suite']})",
                *(cell for one in pair for cell in (f"`{one['method']}`", cell_ms(one["step_ms_median"]))),
                cell_ratio(row["step_ms_median"] / without["step_ms_median"]),
                f"up to {cell_share(max(differs))}" if differs else ABSENT,
            ])  # fmt: skip
    return Table(head, lines) if lines else None
