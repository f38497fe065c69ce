"""The out-of-memory guard: runs for which the device is too small."""

from collections.abc import Sequence

from benchmarks.flags import is_guarded, training
from benchmarks.rows import COMPLETE, GIB, Row, outcome
from benchmarks.table import ABSENT, Table, cell_gib, cell_ms, cell_number, listed

COMPARED = ("losses", "grad_norms")


def guarded(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of cases in which some run has the guard, grouped by what they train."""
    cases = {(row["command"], row["case"]) for row in rows if is_guarded(row)}
    found = [row for row in rows if (row["command"], row["case"]) in cases]
    order = list(dict.fromkeys(training(row) for row in found))
    return sorted(found, key=lambda row: order.index(training(row)))


def table(rows: Sequence[Row]) -> Table:
    """Build the table of guarded runs. A run is compared with the first that trains the same, in any command."""
    references: dict[tuple[str, ...], Row] = {}

    def equal(row: Row) -> str:
        if row["outcome"] not in COMPLETE:
            return ABSENT
        reference = references.setdefault(training(row), row)
        return "reference" if reference is row else _equal(row, reference)

    def rescued(row: Row) -> list[int]:
        return row.get("rescues_by_step") or []

    def bytes_gib(row: Row) -> float | None:
        return None if row.get("rescued_bytes") is None else row["rescued_bytes"] / GIB

    return Table.of(rows, {
        "case": lambda row: row["case"],
        "GPUs": lambda row: row.get("num_ranks") or 1,
        "flags": lambda row: f"`--{row['method']}`",
        "held by another program GiB": lambda row: listed([f"{gib:g}" for gib in row.get("held_gib") or ()]) or None,
        "outcome": lambda row: "trained to the end" if row["outcome"] in COMPLETE else outcome(row),
        "steps": lambda row: len(row.get("losses") or ()) or None,
        "saved tensors GiB": lambda row: cell_gib(row.get("saved_peak_gib") or None),
        "device GiB": lambda row: cell_gib(row["machine"]["device_memory_gib"]),
        "rescues": lambda row: cell_number(row.get("num_rescues")),
        "in step 1 (rank 0)": lambda row: next(iter(rescued(row)), None),
        "most in one step (rank 0)": lambda row: max(rescued(row), default=None),
        "last step with one (rank 0)":
            lambda row: max((step for step, number in enumerate(rescued(row), 1) if number), default=None),
        "rescued GiB": lambda row: cell_gib(bytes_gib(row)),
        "first step s": lambda row: cell_number(row["first_step_ms"] / 1e3) if row.get("first_step_ms") else None,
        "later steps ms": lambda row: cell_ms(row["step_ms_median"]),
        "median of": lambda row: len(row["step_ms_all"] or ()) or None,
        "equal": equal,
    })  # fmt: skip


def _equal(row: Row, reference: Row) -> str:
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
