"""Random faults that nobody has chosen: how many of them the tests catch.

    python -m benchmarks.faults.mutants --count 200 --seed 1 --size short --output FILE

A mutant is one small change of the code: another comparison or operator, a negated condition, a number that is one
larger, a call that is left out. The tests run once first, to learn which of them execute which lines (FILE.SIZE.lines;
made anew at another commit). Each mutant then gets the tests that execute its statement, the fastest first, up to the
first that fails. A reader says which of the survivors change nothing, and what became of tests that are not collected.
The machine should be idle otherwise: tests that fail or are slow in the first run are left out.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import sys
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults import executed_lines
from benchmarks.faults.executed_lines import VARIABLE, name_of
from benchmarks.faults.trial import BROKEN, CAUGHT, MISSED, TEST_TIMEOUT_S, TIMEOUT, Outcome, run_trial
from benchmarks.machine import ROOT, facts
from megatron.swap.common.leftovers import own_folder

PACKAGE = ROOT / "megatron/swap"
FOLDERS = ("engine", "layers", "memory", "operators", "optimizer", "params", "planner", "planning", "tensor_swap")
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
NOT_CODE = ("annotation", "returns", "type_params", "decorator_list")  # Fields of a node in which nothing is changed


@dataclass(frozen=True)
class Mutant:
    """Bytes ``start`` to ``stop`` of ``file`` become ``new``. ``lines``: of the statement, or of its head."""

    file: str
    start: int
    stop: int
    new: str
    line: int
    old: str
    lines: tuple[int, int]

    @property
    def id(self) -> str:
        return hashlib.sha256(f"{self.file} {self.start} {self.stop} {self.new}".encode()).hexdigest()[:8]

    def planted(self, root: Path) -> str:
        text = (root / self.file).read_bytes()
        return (text[: self.start] + self.new.encode() + text[self.stop :]).decode()


class _File:
    def __init__(self, name: str, text: bytes) -> None:
        self._name, self._text = name, text
        self._starts = [0, *(place + 1 for place, byte in enumerate(text) if byte == ord("\n"))]

    def mutants(self) -> Iterator[Mutant]:
        yield from self._of(ast.parse(self._text), (1, len(self._starts)), False)

    def _of(self, node: ast.AST, lines: tuple[int, int], is_in_function: bool) -> Iterator[Mutant]:
        if is_in_function and isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            lines = (node.lineno, last)
        for start, stop, new in self._here(node):
            old = self._text[start:stop].decode()
            yield Mutant(self._name, start, stop, new, bisect(self._starts, start), old, lines)
        is_in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for field, value in ast.iter_fields(node):
            if field in NOT_CODE or isinstance(node, (ast.Raise, ast.Assert)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._of(child, lines, is_in_function)

    def _here(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield self._between(node.left, node.comparators[0], *COMPARISONS[type(node.ops[0])])
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield self._between(node.left, node.right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield self._between(node.values[0], node.values[1], *words)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield *self._span(node), f"bool({self._source(node.operand)})"
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            value: Any = node.value
            yield *self._span(node), str(not value if isinstance(value, bool) else value + 1)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield *self._span(node), NAMES[node.id]
        elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield *self._span(node.test), f"(not ({self._source(node.test)}))"
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield *self._span(node), "pass"
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield *self._span(node), "return None"

    def _span(self, node: Any) -> tuple[int, int]:
        starts = self._starts
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._text[start:stop].decode()

    def _between(self, left: Any, right: Any, old: str, new: str) -> tuple[int, int, str]:
        start, stop = self._span(left)[1], self._span(right)[0]
        return start, stop, self._text[start:stop].decode().replace(old, new, 1)


def mutants(files: Sequence[str], root: Path = ROOT) -> list[Mutant]:
    return [mutant for file in files for mutant in _File(file, (root / file).read_bytes()).mutants()]


class _Recorder:
    """Instead of a mutant: the file through which each process of a trial notes the lines that it executes."""

    file = "sitecustomize.py"

    def planted(self, root: Path) -> str:
        return "import benchmarks.faults.executed_lines\n"


def record(tests: Sequence[str], num_jobs: int) -> dict[str, Any]:
    """Run ``tests`` once. Return those that pass, the fastest first, and which ones execute each line."""
    with own_folder("swap-executed-lines-") as (folder, _):
        running = folder / "running"
        running.write_text(name_of(""))
        os.environ[VARIABLE] = str(running)
        plugin = ["-p", executed_lines.__name__, "-n", str(num_jobs), "--dist=worksteal", "--maxfail=0"]
        outcome = run_trial(ROOT, _Recorder(), [*plugin, *tests], timeout_s=4 * 3600)
        del os.environ[VARIABLE]
        rows = [json.loads(line) for path in folder.glob("tests-*") for line in path.read_text().splitlines()]
        # Slow ones may not end in time beside a second mutant.
        taken = [row for row in rows if row["passed"] and row["seconds"] < TEST_TIMEOUT_S / 2]
        if not taken:
            raise RuntimeError(f"no test passed: {outcome.error}")
        print(f"{len(taken)} of {len(rows)} tests passed in time, {outcome.seconds:.0f} s in all", flush=True)
        names = ["", *(row["test"] for row in sorted(taken, key=lambda row: row["seconds"]))]
        lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, name in enumerate(names):
            of_test = {path for test in (name, name.partition("::")[0]) if (path := folder / name_of(test)).exists()}
            for place in {place for path in of_test for place in path.read_text().splitlines()}:
                file, _, line = place.rpartition(":")
                lines[f"megatron/swap/{file}"][line].append(number)
        return {"tests": names, "left_out": sorted({row["test"] for row in rows}.difference(names)), "lines": lines}


def executing_tests(mutant: Mutant, executed: dict[str, Any]) -> list[str]:
    of_file = executed["lines"].get(mutant.file, {})
    numbers = {number for line in range(mutant.lines[0], mutant.lines[1] + 1) for number in of_file.get(str(line), ())}
    if numbers == {0}:
        numbers = {number for line in of_file.values() for number in line}
    return [executed["tests"][number] for number in sorted(numbers - {0})]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help=f"of megatron/swap; default: {' '.join(FOLDERS)}")
    parser.add_argument("--size", choices=("short", "all"), default="short", help="tests of tests/run.sh, or of --all")
    parser.add_argument("--tests", nargs="+", default=[], help="default: all")
    parser.add_argument("--jobs", type=int, default=2, help="mutants, and recorded tests, at the same time (default 2)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the tests of one mutant")
    parser.add_argument("--output", type=Path, required=True, help="rows are appended; mutants with one do not run")
    options = parser.parse_args(argv)
    os.environ |= {"SWAP_TESTS": options.size, "MEGATRON_SWAP_PYTHON": sys.executable}
    places = [PACKAGE / folder for folder in options.folders]
    paths = [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    found = mutants([str(path.relative_to(ROOT)) for path in paths])
    chosen = random.Random(options.seed).sample(found, min(options.count, len(found)))
    rows = options.output.read_text().splitlines() if options.output.exists() else []
    known = {row["id"]: row for row in map(json.loads, rows) if row["size"] == options.size}
    about = {"size": options.size, "seed": options.seed, "num_sites": len(found), "commit": facts()["commit"]}
    recorded = options.output.with_name(f"{options.output.name}.{options.size}.lines")
    executed = json.loads(recorded.read_text()) if recorded.exists() else {}
    if executed.get("of") != (of := [about["commit"], *options.tests]):
        executed = {"of": of, **record(options.tests, options.jobs)}
        recorded.write_text(json.dumps(executed))

    def tried(mutant: Mutant) -> dict[str, Any]:
        tests = executing_tests(mutant, executed)
        outcome = run_trial(ROOT, mutant, tests, options.timeout) if tests else Outcome(MISSED)
        return {"id": mutant.id, **vars(mutant), **vars(outcome), "num_tests": len(tests), **about}

    with ThreadPoolExecutor(options.jobs) as pool, options.output.open("a") as file:
        for done in as_completed([pool.submit(tried, mutant) for mutant in chosen if mutant.id not in known]):
            row = done.result()
            known[row["id"]] = row
            print(json.dumps(row), file=file, flush=True)
            where = f"{row['file']}:{row['line']}  {row['old']!r} -> {row['new']!r}"
            print(f"{row['outcome']:8} {row['seconds']:6.1f} s  {where}", flush=True)
    for folder in (*options.folders, ""):
        outcomes = [known[one.id]["outcome"] for one in chosen if one.file.startswith(f"megatron/swap/{folder}")]
        words = {CAUGHT: "caught", MISSED: "missed", TIMEOUT: "ended by time", BROKEN: "not collected"}
        counts = ", ".join(f"{outcomes.count(outcome)} {word}" for outcome, word in words.items())
        print(f"{folder or 'all'}: {counts}, of {len(outcomes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
