"""Random faults that nobody has chosen: how many of them the tests catch.

    python -m benchmarks.faults.mutants --count 200 --seed 1
    python -m benchmarks.faults.mutants --files megatron/swap/engine/offload.py --count 20 --tests tests/unit/engine

A mutant is one small change of the code: another comparison or operator, a negated condition, a number that is one
larger, a call that is left out. Sites are drawn with equal chances. For each, the unit tests of its folder run, or
``--tests``. The survivors are for a reader, who says which of them change nothing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.trial import BROKEN, MISSED, run_trial
from benchmarks.machine import ROOT, facts

FOLDERS = (
    "dry", "engine", "forecast", "memory", "nn", "operators", "optimizer", "planner", "profiling", "tensor_swap",
)  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
NOT_CODE = ("annotation", "returns", "type_params", "decorator_list")
"""Fields of a node in which nothing is changed."""


@dataclass(frozen=True)
class Mutant:
    """Bytes ``start`` to ``stop`` of ``file`` become ``new``."""

    file: str
    start: int
    stop: int
    new: str
    line: int
    old: str

    @property
    def id(self) -> str:
        return hashlib.sha256(f"{self.file} {self.start} {self.stop} {self.new}".encode()).hexdigest()[:8]

    def planted(self, root: Path) -> str:
        """Return the text of the file with the change in it."""
        text = (root / self.file).read_bytes()
        return (text[: self.start] + self.new.encode() + text[self.stop :]).decode()


class _File:
    """Finds the sites of one file."""

    def __init__(self, name: str, text: bytes) -> None:
        self._name, self._text = name, text
        self._lines = [0, *(place + 1 for place, byte in enumerate(text) if byte == ord("\n"))]

    def mutants(self) -> Iterator[Mutant]:
        yield from self._of(ast.parse(self._text))

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        yield from self._here(node)
        for field, value in ast.iter_fields(node):
            if field in NOT_CODE or isinstance(node, (ast.Raise, ast.Assert)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._of(child)

    def _here(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield self._between(node.left, node.comparators[0], *COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield self._between(node.left, node.right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield self._between(node.values[0], node.values[1], *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._instead(node, f"bool({self._source(node.operand)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            value: Any = node.value
            yield self._instead(node, str(not value if isinstance(value, bool) else value + 1))
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield self._instead(node, NAMES[node.id])
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield self._instead(node.test, f"(not ({self._source(node.test)}))")
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield self._instead(node, "pass")
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield self._instead(node, "return None")

    def _span(self, node: Any) -> tuple[int, int]:
        starts = self._lines
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._text[start:stop].decode()

    def _instead(self, node: Any, new: str) -> Mutant:
        return Mutant(self._name, *self._span(node), new, node.lineno, self._source(node))

    def _between(self, left: Any, right: Any, old: str, new: str) -> Mutant:
        """Replace the operator ``old`` between two operands."""
        start, stop = self._span(left)[1], self._span(right)[0]
        words = self._text[start:stop].decode()
        changed = words.replace(old, new, 1)
        return Mutant(self._name, start, stop, changed, left.end_lineno, words)


def mutants(files: Sequence[str], root: Path = ROOT) -> list[Mutant]:
    """Return all mutants of ``files``, in order."""
    return [mutant for file in files for mutant in _File(file, (root / file).read_bytes()).mutants()]


def files_of(folders: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return the Python files of these folders of the package."""
    found = (path for folder in folders for path in sorted((root / "megatron/swap" / folder).rglob("*.py")))
    return [str(path.relative_to(root)) for path in found]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", nargs="+", help=f"default: all of {', '.join(FOLDERS)}")
    parser.add_argument("--tests", nargs="+", help="default: the unit tests of the mutant's folder")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for the tests of one mutant")
    parser.add_argument("--output", type=Path, help="append rows here; mutants that have one are not run again")
    options = parser.parse_args(argv)
    found = mutants(options.files or files_of(FOLDERS))
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    rows = [] if options.output is None or not options.output.exists() else options.output.read_text().splitlines()
    known = {row["id"]: row for row in map(json.loads, rows)}
    about = {"seed": options.seed, "num_sites": len(found), "commit": facts()["commit"]}
    for mutant in chosen:
        if mutant.id in known:
            continue
        tests = options.tests or [f"tests/unit/{Path(mutant.file).parts[2]}"]
        outcome = run_trial(ROOT, mutant, tests, options.timeout)
        row = {"id": mutant.id, **vars(mutant), **vars(outcome), **about}
        known[mutant.id] = row
        where = f"{mutant.file}:{mutant.line}  {mutant.old!r} -> {mutant.new!r}"
        print(f"{outcome.outcome:8} {outcome.seconds:6.1f} s  {where}", flush=True)
        if options.output is not None:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
    outcomes = [known[mutant.id]["outcome"] for mutant in chosen]
    num_caught = sum(outcome not in (MISSED, BROKEN) for outcome in outcomes)
    print(f"{num_caught} of {len(outcomes)} mutants caught, of {len(found)} sites")
    return 0


if __name__ == "__main__":
    sys.exit(main())
