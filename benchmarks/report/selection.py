"""Which rows of the result files count (the rule is written down in docs/dev/results.md)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import PRUNED, Row

VERIFIED = "prove-"
"""Suites of tools/verify.py begin with this word. All of their rows count, because a command compares its own runs."""


def current(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one file that count, in their order.

    Of rows with the same suite, case, method and budget the last one counts: files list runs from the oldest to the
    newest. A row that was not run (pruned) never replaces one that was.
    """
    chosen: dict[tuple[object, ...], int] = {}
    for index, row in enumerate(rows):
        if row["suite"].startswith(VERIFIED):
            chosen[("verified", index)] = index
            continue
        key = (row["suite"], row["case"], row["method"], row.get("budget_gib"))
        before = chosen.get(key)
        if before is None or row["outcome"] != PRUNED or rows[before]["outcome"] == PRUNED:
            chosen[key] = index
    return [rows[index] for index in sorted(chosen.values())]
