"""The schema of result rows and the messages for rows that break it; result files that grow, resume and are locked."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import UNPLANNED, RowError, check_row, read_rows
from benchmarks.store import ResultStore, StoreError, locked
from tests.unit.benchmarks.made_report import a_row


def row(**changed: Any) -> dict[str, Any]:
    good = {
        "suite": "quick", "case": "tiny", "method": "none", "flags": "--num-layers 2", "outcome": "ok", "versions": {},
        "machine": {}, "commit": "", "command": "python tools/bench.py", "step_ms_median": 2.5, "step_ms_all": [2.0, 3],
        "first_step_ms": 9.0, "host_peak_gib": 0, "tokens_per_s": 100.0, "num_params": 12, "loss_hex": "0x1p+0",
        "device_peak_gib": None, "device_static_gib": None, "device_reserved_gib": None, "losses_equal": None,
        "budget_gib": None, "predicted_peak_gib": None, "predicted_step_ms": None, "profile_sha256": None,
        "num_replans": None,
    }  # fmt: skip
    return {**good, **changed}


MEASURED = ("step_ms_median", "step_ms_all", "first_step_ms", "host_peak_gib", "tokens_per_s", "num_params", "loss_hex")


def test_which_fields_are_needed() -> None:
    for field in row():
        check_row(broken := row())
        del broken[field]
        with pytest.raises(RowError, match=f"line 3 .*field '{field}' is missing"):
            check_row(broken, "line 3")
    for outcome in ("oom_device", "oom_host", "refused", "timeout", "failed (-6)", "missing: tune", "not ready"):
        check_row(row(outcome=outcome, **dict.fromkeys(MEASURED)))
    for field in MEASURED:
        with pytest.raises(RowError, match=f"method 'none'.*'{field}' is null"):
            check_row(row(**{field: None}))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("outcome", "crashed", "'outcome' is 'crashed'; allowed"),
        ("date", "yesterday", "a time in ISO 8601 is expected"),
        ("step_ms_median", "2.5", "'step_ms_median' is '2.5', not of type int or float"),
        ("step_ms_all", [1.0, "2"], r"'step_ms_all\[\]' is '2'"),
        ("num_params", True, "'num_params' is True"),
        ("peak", "highest", "'peak' is 'highest'; allowed: allocated, reserved, saved"),
    ],
)
def test_wrong_values(field: str, value: Any, said: str) -> None:
    with pytest.raises(RowError, match=said):
        check_row(row(**{field: value}))


def test_rows_from_before_the_planner_were_planned_by_nobody(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    old = {field: value for field, value in row().items() if field not in UNPLANNED}
    path.write_text(json.dumps(old) + "\n")
    assert read_rows(path) == [row()]
    path.write_text(json.dumps({**old, "budget_gib": 24.0}) + "\n")
    with pytest.raises(RowError, match="'predicted_peak_gib' is missing"):
        read_rows(path)


def test_a_file_is_held_by_all_of_its_names(tmp_path: Path) -> None:
    rows, another = tmp_path / "rows.jsonl", tmp_path / "another.jsonl"
    rows.touch()
    another.symlink_to(rows)
    with locked(rows), pytest.raises(StoreError, match="another run is writing it"), locked(another):
        pass
    with locked(another):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "another.jsonl"}


def test_every_row_is_in_the_file_at_once_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.jsonl"
    store = ResultStore(path, resume=True)
    for number in range(3):
        store.append(a_row(str(number), 10.0, 1.0))
        assert read_rows(path) == store.rows
    with pytest.raises(RowError, match="'commit' is null"):
        store.append({**a_row("two", 10.0, 1.0), "commit": None})
    assert [row["method"] for row in read_rows(path)] == [row["method"] for row in store.rows] == ["0", "1", "2"]
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(StoreError, match=r"rows\.jsonl exists: continue it with --resume, or name another file"):
        ResultStore(path, resume=False)
    ResultStore(path, resume=True).append(a_row("3", 10.0, 1.0))
    assert [row["method"] for row in read_rows(path)] == ["0", "1", "2", "3"]
