"""Read docs/results, and choose the rows that count (the rule is written down in docs/dev/results.md)."""

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import profiles
from benchmarks.rows import PRUNED, Row, check_sweep_row, read_rows

VERIFIED = "prove-"
"""Suites of tools/verify.py begin with this word. All of their rows count, because a command compares its own runs."""
ASIDE = "again"
"""A result file with this word in its name repeats single runs on another day; it is left out of the report."""
EXAMPLES = "h200-examples.json"
PRINTED = re.compile(r"(\d+) ms a step, ([\d.]+) GiB of the GPU")


def current(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that count: of rows that measure the same the last one, but a pruned one replaces none."""
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


@dataclass(frozen=True)
class Example:
    script: str
    plain: tuple[float, float]
    swapped: tuple[float, float]


@dataclass
class Results:
    folder: Path
    files: list[tuple[str, list[Row]]]
    profiles: list[profiles.Group]
    literature: list[dict[str, Any]]
    examples: list[Example] = field(default_factory=list)
    suites: dict[str, list[Row]] = field(init=False, default_factory=dict)
    """Rows by suite; ``SUITE, FILE`` for a benchmark whose file is not named after its suite."""
    sweeps: dict[str, list[Row]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, row in ((name, row) for name, rows in self.files for row in current(rows)):
            suite = row["suite"]
            if "axis" in row:  # of a sweep
                check_sweep_row(row, name)
                self.sweeps.setdefault(suite, []).append(row)
                continue
            # Times are compared within one file only: on another day the machine may be another one.
            has_own = suite.startswith(VERIFIED) or Path(name).stem == suite
            self.suites.setdefault(suite if has_own else f"{suite}, {name}", []).append(row)


def read_results(folder: Path) -> Results:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder: the report is made from the results in it")
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.stem)
    literature, examples = folder / "literature.toml", folder / EXAMPLES
    return Results(
        folder,
        [(path.name, read_rows(path)) for path in paths if ASIDE not in path.stem],
        profiles.read_profiles(folder),
        tomllib.loads(literature.read_text())["works"] if literature.exists() else [],
        _examples(json.loads(examples.read_text())["runs"]) if examples.exists() else [],
    )


def _examples(runs: Sequence[dict[str, Any]]) -> list[Example]:
    found = []
    for run in runs:
        matches = [match for line in run["printed"] if (match := PRINTED.search(line)) is not None]
        figures = [(float(match[1]), float(match[2])) for match in matches]
        name = Path(run["command"].split()[1]).name
        found += [Example(name, *pair) for pair in zip(figures[::2], figures[1::2], strict=True)]
    return found
