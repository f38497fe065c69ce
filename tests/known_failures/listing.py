"""The known failures as a list: what others saw, what holds here, the tests, and the faults that were planted.

Nothing of it is typed twice. The words are those of the tests' docstrings, the faults those of
``benchmarks/faults/definitions/known_failures.toml``, the results those of ``docs/results/known-failures.json``.
Reports without a section of their own are in ``reports.toml``.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.catalog import Fault, load_rooms

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/known_failures"
ROOM = "known_failures"
RESULTS = ROOT / "docs" / "results" / "known-failures.json"
REPORTS = ROOT / HERE / "reports.toml"
THREAD = re.compile(r"\b([\w.-]+/[\w.-]+)#(\d+)\b")


@dataclass(frozen=True)
class KnownFailure:
    """One failure: a class of tests, whose docstring has its title, what was ``seen`` where, and what holds ``here``.

    Attributes:
        tests: node ids of the class, one for each file that has it.
        faults: what was planted.
    """

    name: str
    title: str
    seen: str
    here: str
    tests: tuple[str, ...]
    faults: tuple[Fault, ...]

    @property
    def threads(self) -> list[str]:
        """The threads that ``seen`` names."""
        return [f"{repository}#{number}" for repository, number in THREAD.findall(self.seen)]


def classes() -> Iterator[tuple[str, str, str]]:
    """Each class of tests: its file, its name, its docstring."""
    for path in sorted((ROOT / HERE).glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield f"{HERE}/{path.name}", node.name, ast.get_docstring(node) or ""


def planted() -> tuple[Fault, ...]:
    """All faults that were planted for known failures."""
    return next(room.faults for room in load_rooms() if room.name == ROOM)


def known_failures() -> list[KnownFailure]:
    """All failures, in the order of their files."""
    found = list(classes())
    failures = []
    for _, name, text in found:
        told = re.fullmatch(r"(.*?)\n\n(Seen.*?)\n\nHere: (.*)", text, re.DOTALL)
        if told is None:
            continue
        title, seen, here = (" ".join(part.split()) for part in told.groups())
        tests = tuple(f"{file}::{other}" for file, other, _ in found if other == name)
        faults = tuple(fault for fault in planted() if set(fault.tests) & set(tests))
        failures.append(KnownFailure(name, title, seen, here, tests, faults))
    return failures


def results() -> dict[str, Any]:
    """The result of each planted fault, by its id."""
    return {row["id"]: row for row in json.loads(RESULTS.read_text())["faults"]}


@dataclass(frozen=True)
class ReportedKind:
    """What goes wrong in several reports, and what happens here. Without ``tests`` it was tried by hand."""

    what: str
    here: str
    tests: list[str]
    reports: dict[str, str]


def reported_kinds() -> list[ReportedKind]:
    """All kinds of ``reports.toml``, in its order."""
    return [ReportedKind(**kind) for kind in tomllib.loads(REPORTS.read_text())["kind"]]


# ---------------------------------------------------------------------------------------------------------- page

HEAD = """\
# Known failures

<!-- made by `python -m tests.pages` from the tests, the planted faults and their results -->

What has offloading done to others, and does it happen here? Each section is a failure that people reported, what
Megatron Swap promises instead, and its test. Faults of each kind were planted: the tests caught all.

The tests need no GPU: `python -m pytest tests/known_failures`. `python -m benchmarks.faults --room known_failures`
plants the faults again.
"""

REPORTS_HEAD = """\
## More reports, by kind

Each kind was tried with all layers offloaded, and at budgets down to the least feasible one. *Equal*: to the bit.
*Refused*: by an error that says what to change. `tests/known_failures/reports.toml` has more on each report.

| what goes wrong | here | reports |
|---|---|---|
"""


def linked(text: str) -> str:
    """``text`` with a link for each thread."""
    return THREAD.sub(r"[\1#\2](https://github.com/\1/issues/\2)", text)


def reports_table() -> str:
    """A row for each kind."""
    rows = []
    for kind in reported_kinds():
        threads = ", ".join(
            f"[{repository.partition('/')[2]}#{number}](https://github.com/{repository}/issues/{number})"
            for repository, number in (THREAD.fullmatch(thread).groups() for thread in kind.reports)  # type: ignore[union-attr]
        )
        rows.append(f"| {kind.what} | {kind.here} | {threads} |\n")
    return REPORTS_HEAD + "".join(rows)


def known_failures_page() -> str:
    """The page with all failures."""
    lines = [HEAD]
    for failure in known_failures():
        tests = ", ".join(f"`{test}`" for test in failure.tests)
        faults = ", ".join(f"`{fault.id}`" for fault in failure.faults)
        lines += [f"## {failure.title.rstrip('.')}", "", linked(failure.seen), "", f"**Here:** {failure.here}", "",
                  f"Tests: {tests}. Planted: {faults}.", ""]  # fmt: skip
    return "\n".join([*lines, reports_table()])
