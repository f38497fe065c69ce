"""Who may write a file of rows, and what stands beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from proof.bench.output import alone, check_beside
from proof.bench.toml_file import SuiteError


def test_a_file_is_held_by_all_of_its_names(tmp_path: Path) -> None:
    rows, another = tmp_path / "rows.jsonl", tmp_path / "another.jsonl"
    rows.touch()
    another.symlink_to(rows)
    with alone(rows), pytest.raises(SuiteError, match="another run is writing it"), alone(another):
        pass
    with alone(another):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "another.jsonl"}


def test_what_is_somebodys_is_not_overwritten(tmp_path: Path) -> None:
    rows, table = tmp_path / "rows.jsonl", tmp_path / "rows.md"
    check_beside(rows)
    table.write_text("mine")
    with pytest.raises(SuiteError, match=r"rows\.md is there, and would be overwritten"):
        check_beside(rows)
    rows.touch()
    with pytest.raises(SuiteError, match="would be overwritten"):
        check_beside(rows)
    rows.write_text("{}")
    check_beside(rows)
    table.unlink()
    table.mkdir()
    with pytest.raises(SuiteError, match="would be overwritten"):
        check_beside(rows)
