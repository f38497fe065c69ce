"""Random faults: each is one small change, and the file is Python still."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.mutants import FOLDERS, files_of, mutants
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


def test_all_files_have_some() -> None:
    found = mutants(files_of(FOLDERS))
    assert len(found) > 5000
    assert len({one.id for one in found}) == len(found)


@pytest.mark.slow
def test_a_trial(tmp_path: Path) -> None:
    """A mutant is caught by the tests of its file, and is not tried twice."""
    command = [
        sys.executable, "-m", "benchmarks.faults.mutants", "--files", "megatron/swap/common/layer_ranges.py",
        "--tests", "tests/unit/common/test_layer_ranges.py", "--count", "1", "--output", str(tmp_path / "rows"),
    ]  # fmt: skip
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert first[0].startswith("caught ")
    assert first[1].startswith("1 of 1 mutants caught, of ")
    assert second == first[1:]
