"""Random faults: each is one small change, and the file is Python still."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.mutants import FOLDERS, Mutant, executing_tests, files_of, mutants, record
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


def test_a_statement_in_a_function_has_its_own_lines(tmp_path: Path) -> None:
    """Elsewhere code runs at import, and any line of the file may show what it made."""
    (tmp_path / "size.py").write_text("LIMIT = 3\n" + TEXT + "    for b in (\n        7,\n    ):\n        print(b)\n")
    lines = {one.old: one.lines for one in mutants(["size.py"], tmp_path)}
    assert lines["3"] == (5, 5)  # the last of that text
    assert lines["True"] == (1, 14)
    assert lines["7"] == (10, 12)
    assert lines["print(b)"] == (13, 13)


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


def test_all_files_have_some() -> None:
    found = mutants(files_of(FOLDERS))
    assert len(found) > 5000
    assert len({one.id for one in found}) == len(found)


@pytest.mark.slow
def test_a_trial(tmp_path: Path) -> None:
    """A mutant is caught by the tests of its line, and is not tried twice."""
    command = [
        sys.executable, "-m", "benchmarks.faults.mutants", "--folders", "common/layer_ranges.py", "--size", "all",
        "--tests", "tests/unit/common/test_layer_ranges.py", "--count", "1", "--output", str(tmp_path / "rows"),
    ]  # fmt: skip
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert "tests passed in time" in first[0]
    assert first[1].startswith("caught ")
    result = "1 caught, 0 missed, 0 ended by time, 0 not collected, of 1"
    assert first[2:] == second == [f"common/layer_ranges.py: {result}", f"all: {result}"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lines_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that an earlier test has started forks the trainer of the second test, which alone loads state."""
    monkeypatch.setenv("SWAP_TESTS", "all")
    monkeypatch.setattr("benchmarks.faults.mutants.TEST_TIMEOUT_S", float("inf"))  # of a busy machine, too
    path = "tests/integration/test_ledger.py"
    tests = [f"{path}::test_activations_in_host_memory", f"{path}::test_saved_in_its_last_step"]
    executed = record(["-n", "0", "-o", "timeout=600", *tests])
    assert sorted(executed["tests"]) == ["", *tests]

    def num_lines(file: str) -> list[int]:
        lines = executed["lines"][f"megatron/swap/{file}"].values()
        return [sum(executed["tests"].index(test) in numbers for numbers in lines) for test in tests]

    first, second = num_lines("engine/offload.py")
    assert first > second
    first, second = num_lines("optimizer/stepper.py")
    assert first < second
