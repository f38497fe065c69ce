"""Result files: storing, resuming, locking, and the files beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rows import Row, RowError, read_rows
from benchmarks.store import ResultStore, StoreError, check_beside, locked
from tests.unit.benchmarks.made_report import a_row


def test_a_file_is_held_by_all_of_its_names(tmp_path: Path) -> None:
    rows, another = tmp_path / "rows.jsonl", tmp_path / "another.jsonl"
    rows.touch()
    another.symlink_to(rows)
    with locked(rows), pytest.raises(StoreError, match="another run is writing it"), locked(another):
        pass
    with locked(another):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "another.jsonl"}


def test_what_is_somebodys_is_not_overwritten(tmp_path: Path) -> None:
    rows, table = tmp_path / "rows.jsonl", tmp_path / "rows.md"
    check_beside(rows)
    table.write_text("mine")
    with pytest.raises(StoreError, match=r"rows\.md is there, and would be overwritten"):
        check_beside(rows)
    rows.touch()
    with pytest.raises(StoreError, match="would be overwritten"):
        check_beside(rows)
    rows.write_text("{}")
    check_beside(rows)
    table.unlink()
    table.mkdir()
    with pytest.raises(StoreError, match="would be overwritten"):
        check_beside(rows)


def test_every_row_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    path.parent.mkdir()
    store = ResultStore(path, resume=False)
    for number in range(3):
        store.append(a_row(str(number), 10.0, 1.0))
        assert read_rows(path) == store.rows
    store.replace(store.rows[1:])
    assert [row["method"] for row in read_rows(path)] == ["1", "2"]


def test_a_wrong_row_leaves_file_and_rows_as_they_were(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "rows.jsonl", resume=False)
    store.append(a_row("one", 10.0, 1.0))
    with pytest.raises(RowError, match="'commit' is null"):
        store.append({**a_row("two", 10.0, 1.0), "commit": None})
    assert store.rows == read_rows(tmp_path / "rows.jsonl") == [a_row("one", 10.0, 1.0)]


def test_a_file_is_continued_only_where_that_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ResultStore(path, resume=True).append(a_row("one", 10.0, 1.0))
    with pytest.raises(StoreError, match=r"rows\.jsonl exists: continue it with --resume, or name another file"):
        ResultStore(path, resume=False)
    store = ResultStore(path, resume=True)
    store.append(a_row("two", 10.0, 1.0))
    assert [row["method"] for row in read_rows(path)] == ["one", "two"]


def test_rows_are_checked_as_the_owner_says(tmp_path: Path) -> None:
    def check(row: Row, where: str) -> None:
        raise RowError(f"{where} has no axis")

    path = tmp_path / "rows.jsonl"
    ResultStore(path, resume=False).append(a_row("one", 10.0, 1.0))
    with pytest.raises(RowError, match=r"rows\.jsonl:1 has no axis"):
        ResultStore(path, resume=True, check=check)


def test_without_a_file_rows_stay_in_memory(tmp_path: Path) -> None:
    store = ResultStore(None, resume=False)
    store.append(a_row("one", 10.0, 1.0))
    assert [row["method"] for row in store.rows] == ["one"]
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_not_comparable_are_refused(tmp_path: Path) -> None:
    store = ResultStore(tmp_path / "rows.jsonl", resume=True)
    store.require_same("a none", {"commit": "x", "more": 1}, {"commit": "x"})
    with pytest.raises(StoreError, match=r"--resume: .*rows\.jsonl has commit 'x' for a none, this run has 'y': rows "):
        store.require_same("a none", {"commit": "x"}, {"commit": "y"})


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StoreError, match=r"rows\.jsonl cannot be written .*; name another file"), locked(
        tmp_path / "file" / "rows.jsonl"
    ):
        pass
