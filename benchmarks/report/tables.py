"""Tables of runs that were compared to the bit, and of the result files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.flags import is_ours
from benchmarks.report.results import VERIFIED
from benchmarks.rows import COMPLETE, GIB, Row, outcome
from benchmarks.table import ABSENT, Table, cell_gib, cell_number

PLAIN = "none"  # The method that runs Megatron alone
COMPARED = ("losses_equal", "grad_norms_equal", "weights_sha256_equal")


@dataclass(frozen=True)
class EqualRun:
    """A run and how it relates to the reference: the first completed run of its case."""

    row: Row
    is_reference: bool
    is_compared: bool
    """Whether the reference ran before it, so that the run was compared with the reference bit for bit."""

    @property
    def is_ours(self) -> bool:
        return is_ours(self.row)

    @property
    def is_equal(self) -> bool:
        return self.row["outcome"] in COMPLETE and all(self.row.get(field) is not False for field in COMPARED)

    def verdict(self, field: str) -> str:
        if self.is_reference:
            return "reference"
        if self.row["outcome"] not in COMPLETE:
            return outcome(self.row)
        return {None: ABSENT, True: "equal", False: "**differ**"}[self.row.get(field)]


def equal_runs(rows: Sequence[Row]) -> list[EqualRun]:
    seen: set[tuple[str, str]] = set()
    found = []
    for row in rows:
        case = row["command"], row["case"]
        found.append(EqualRun(row, case not in seen and row["outcome"] == "ok", case in seen))
        if row["outcome"] == "ok":
            seen.add(case)
    return found


def equal_to_plain(rows: Sequence[Row]) -> list[EqualRun]:
    """Return the runs of ours in ``rows`` of one suite that were compared bit for bit with a run without swapping."""
    found, is_plain = [], False
    for run in equal_runs(rows):
        if not run.row["suite"].startswith(VERIFIED):
            is_deterministic = "--swap-deterministic" in run.row["flags"].split()
            if run.is_ours and run.row["outcome"] == "ok" and is_deterministic and run.row["reference"] == PLAIN:
                found.append(run)
        elif run.is_reference:
            is_plain = not run.is_ours
        elif run.is_compared and run.is_ours and is_plain:
            found.append(run)
    return found


def equality_table(runs: Sequence[EqualRun]) -> Table:
    def flags(row: Row) -> str:
        setting = f"--{row['method']}"
        return " ".join([setting, *row["flags"].partition(setting)[2].split()])

    def out_gib(row: Row) -> float | None:
        return row["swapped_out_bytes"] / GIB if row.get("swapped_out_bytes") else None

    return Table.of(runs, {
        "case": lambda run: run.row["case"],
        "ranks": lambda run: run.row.get("num_ranks") or 1,
        "steps": lambda run: len(run.row.get("losses") or ()) or None,
        "flags": lambda run: f"`{flags(run.row)}`",
        "out GiB a step": lambda run: cell_gib(out_gib(run.row)),
        "losses": lambda run: run.verdict("losses_equal"),
        "gradient norms": lambda run: run.verdict("grad_norms_equal"),
        "final weights": lambda run: run.verdict("weights_sha256_equal"),
    })  # fmt: skip


def sources_table(files: Sequence[tuple[str, Sequence[Row]]], folder: str) -> Table:
    return Table.of(files, {
        "file": lambda file: f"[{file[0]}]({folder}/{file[0]})",
        "suite": lambda file: _distinct(row["suite"] for row in file[1]),
        "runs": lambda file: cell_number(len(file[1])),
        "machine":
            lambda file: _distinct(f"{row['machine'].get('num_gpus', 1)} × {row['machine']['gpu']}" for row in file[1]),
        "commit": lambda file: _distinct(row["commit"][:7] or "unknown" for row in file[1]),
    })  # fmt: skip


def _distinct(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
