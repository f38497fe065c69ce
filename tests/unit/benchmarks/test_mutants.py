"""Random faults: each is one small change, and the file is Python still."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.mutants import Mutant, executing_tests, mutants
from benchmarks.machine import ROOT

TEXT = '''\
"""Sizes: ü."""
def size(a: int, b: list[int] | None = None, *, is_on: bool = True) -> int:
    """Return 1."""
    if a < 3 and not is_on:
        raise ValueError(f"{a + 1}")
    print("é", a)
    a += 1
    return min(a, -2) if b is not None else a * 4
'''
CHANGES = {
    " < -> <= ", " and -> or ", " is not -> is ", " * -> / ", "3 -> 4", "1 -> 2", "2 -> 3", "4 -> 5", "min -> max",
    "not is_on -> bool(is_on)", "True -> False", "a += 1 -> pass", 'print("é", a) -> pass',
    "a < 3 and not is_on -> (not (a < 3 and not is_on))", "b is not None -> (not (b is not None))",
    "return min(a, -2) if b is not None else a * 4 -> return None",
}  # fmt: skip


def test_one_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "size.py").write_text(TEXT)
    found = mutants(["size.py"], tmp_path)
    assert {f"{one.old}->{one.new}" if one.old[0] == " " else f"{one.old} -> {one.new}" for one in found} == CHANGES
    for one in found:
        planted = one.planted(tmp_path)
        compile(planted, one.file, "exec")
        pairs = enumerate(zip(TEXT.splitlines(), planted.splitlines(), strict=True), 1)
        assert [number for number, (before, after) in pairs if before != after] == [one.line]


def test_the_tests_of_a_statement() -> None:
    """The fastest first. A line that runs at import alone has the tests of its file."""
    executed = {
        "tests": ["", "fast", "slow", "slowest"], "lines": {"a.py": {"1": [0], "2": [2], "3": [1, 2], "9": [0, 3]}}
    }  # fmt: skip

    def chosen(*lines: int, file: str = "a.py") -> list[str]:
        return executing_tests(Mutant(file, 0, 1, "", lines[0], "", (lines[0], lines[1])), executed)

    assert chosen(2, 3) == ["fast", "slow"]
    assert chosen(9, 9) == ["slowest"]
    assert chosen(1, 1) == ["fast", "slow", "slowest"]
    assert chosen(4, 8) == chosen(2, 3, file="b.py") == []


@pytest.mark.nightly
def test_a_trial(tmp_path: Path) -> None:
    """A mutant is caught by the tests of its line, and is not tried twice."""
    command = [
        sys.executable, "-m", "benchmarks.faults.mutants", "--folders", "common/layer_ranges.py", "--size", "all",
        "--tests", "tests/unit/common/test_settings.py", "--count", "1", "--output", str(tmp_path / "rows"),
    ]  # fmt: skip
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert "tests passed in time" in first[0]
    assert first[1].startswith("caught ")
    result = "1 caught, 0 missed, 0 ended by time, 0 not collected, of 1"
    assert first[2:] == second == [f"common/layer_ranges.py: {result}", f"all: {result}"]
