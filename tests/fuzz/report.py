"""What many cases come to: outcomes, what was used and how often, and upstream's errors."""

import re
from collections import Counter
from typing import Any

from benchmarks import machine

Row = dict[str, Any]
DID = {
    "reloaded_bytes": "reloaded activations", "recomputed_bytes": "recomputed activations",
    "optimizer_bytes": "had optimizer state in host memory", "disk_bytes": "used the disk",
    "rescues": "were rescued by the guard", "plans": "trained by a plan that the run made itself",
    "kept_bytes": "copied and kept", "late": "reloaded late",
}  # fmt: skip
"""Figure → what a case did in which it is not 0."""


KINDS = {
    "megatron": "random Megatron models", "modules": "swap.activations on random modules",
    "impure": "layers that are no pure functions, within a budget",
}  # fmt: skip
MOVES = ("reloaded_bytes", "recomputed_bytes", "rescues", "optimizer_bytes")
"""Figures of which one is not 0 wherever anything was offloaded and brought back, or recomputed."""


def shortened(row: Row) -> str:
    """Return the first line of a row's error, without the numbers that make it look different in each case.

    An assertion without a message is named by the function that makes it.
    """
    first = row["error"].splitlines()[0]
    if first.endswith(":"):
        first += f" in {re.findall(r'line [0-9]+, in ([^ ]+)', row['trace'])[-1].strip()}"
    return re.sub(r"0x[0-9a-f]+|\d+", "N", first)[:200]


def ranges(numbers: list[int]) -> str:
    """Return ``0-3,7-7`` for 0, 1, 2, 3 and 7."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ",".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))


def counts(rows: list[Row]) -> dict[str, Any]:
    """Return the counts of rows of one kind and number of ranks."""
    compared = [row for row in rows if row["outcome"] == "equal"]
    return {
        "seeds": ranges(sorted({row["seed"] for row in rows})),
        "num_cases": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "idle": sum(not any(row["figures"].get(figure) for figure in MOVES) for row in compared),
        "did": {
            what: number for figure, what in DID.items()
            if (number := sum(bool(row["figures"].get(figure)) for row in compared))
        },
        "features": dict(sorted(Counter(name for row in compared for name in row.get("features", ())).items())),
        "skipped": dict(Counter(shortened(row) for row in rows if row["outcome"] == "skipped").most_common()),
        "seconds": round(sum(row.get("seconds", 0) for row in rows)),
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the counts as text."""
    if not rows:
        return "no case was run"
    found = counts(rows)
    lines = [f"{found['num_cases']} cases: {found['outcomes']}"]
    lines.append(f"of the equal ones: {found['did']}; {found['idle']} moved nothing")
    lines += [f"{number:5} x skipped: {error}" for error, number in found["skipped"].items()]
    return "\n".join(lines)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Return the contents of the result file."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        what = KINDS[row["kind"]]
        ranks = f", {row['ranks']} ranks over gloo" if row["ranks"] > 1 else ", one process"
        groups.setdefault(what + ranks, []).append(row)
    facts = machine.facts()
    facts.pop("link", None)
    return {
        "what": "random models trained with and without swapping: losses, gradients, weights and optimizer state "
        "compared to the bit. A seed gives the same case again.",
        "runs": [{"what": what, **counts(group)} for what, group in groups.items()],
        **facts,
        "command": "python -m tests.fuzz --kind megatron|modules --ranks N --count N --rows FILE; python -m tests.fuzz "
        "--result docs/results/fuzz.json --rows FILE …",
    }  # fmt: skip
