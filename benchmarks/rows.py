"""Result rows: one JSON object per line, with the same fields in every file of docs/results."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.swap.common.records import read_text, write_text

GIB, MIB = 2**30, 2**20
Row = dict[str, Any]
Check = Callable[[Row, str], None]
"""Raises `RowError` unless a row matches its schema. The second argument names the row's file and line."""
Fields = Mapping[str, tuple[type, ...]]  # The types of each field

NOT_READY, NOT_STABLE = "not ready", "not stable"
"""Outcomes of runs whose times do not count. Not ready: a measurement or plan file that the run needs is missing. Not
stable: a timed step ran under a plan that was replaced later."""
COMPLETE = ("ok", NOT_STABLE)
"""Outcomes of runs that made all their steps: these can be compared, whatever their times are."""
NOT_FALLING, PRUNED = "loss not falling", "pruned"
"""Outcomes of sweeps: a run made all steps but its loss did not fall; a run was not made, for the row's reason."""
OUTCOME = re.compile(
    rf"ok|oom_device|oom_host|oom_disk|refused|timeout|{NOT_READY}|{NOT_STABLE}|{NOT_FALLING}|{PRUNED}|"
    r"failed \(-?\d+\)|missing: \S+"
)
WORDS = {
    "oom_device": "out of device memory", "oom_host": "out of host memory", "oom_disk": "out of disk",
    "refused": "refused by upstream", "timeout": "stopped: too slow", NOT_READY: "could not begin",
    NOT_FALLING: "the loss did not fall", NOT_STABLE: "timed before its plan was stable",
}  # fmt: skip
_NUMBER = (int, float)
_NAMED: Fields = {
    **dict.fromkeys(("suite", "case", "method", "flags", "outcome", "commit", "command"), (str,)),
    **dict.fromkeys(("versions", "machine"), (dict,)),
}
_MEASURED: Fields = {
    **dict.fromkeys(("step_ms_median", "first_step_ms", "host_peak_gib", "tokens_per_s"), _NUMBER),
    "step_ms_all": (list,), "num_params": (int,), "loss_hex": (str,),
}  # fmt: skip
"""Null where the run failed."""
_PLANNED: Fields = {
    **dict.fromkeys(("budget_gib", "predicted_peak_gib", "predicted_step_ms"), _NUMBER),
    "profile_sha256": (str,), "num_replans": (int,),
}  # fmt: skip
"""Null without a plan."""
_OPTIONAL: Fields = {
    **dict.fromkeys(("device_peak_gib", "device_static_gib", "device_reserved_gib"), _NUMBER),
    "losses_equal": (bool,), **_PLANNED,
}  # fmt: skip
"""Null also on a machine without a GPU; losses_equal: also where there is nothing to compare with."""
UNPLANNED: Row = dict.fromkeys(_PLANNED)

_SWEPT: Fields = {
    "axis": (str,), "unit": (str,), "value": (int,), "values": (list,), "params": (int,), "param_bytes": (int,),
    "predicted": (dict,), "tiers_gib": (dict,), "is_ours": (bool,),
}  # fmt: skip
"""Fields of a sweep's row. ``values``: all values of the row; a ``pruned`` row has several, from ``value`` on.
``params``: parameters of ``value``, by arithmetic."""
_SWEPT_MEASURED: Fields = {"loss_first": _NUMBER, "loss_last": _NUMBER, "losses": (list,)}
_SWEPT_OPTIONAL: Fields = {"mfu": _NUMBER, "disk_peak_gib": _NUMBER, "why": (str,), "output_tail": (str,)}
TIERS = ("device", "host", "disk")
_PARTS = {"predicted": (*(f"{tier}_gib" for tier in TIERS), "static_gib"), "tiers_gib": TIERS}

PEAKS = {"allocated": "device_peak_gib", "reserved": "device_reserved_gib", "saved": "saved_peak_gib"}
"""The field that counts as a row's peak, by the row's ``peak``: memory that PyTorch's allocator had allocated or
reserved, or the bytes of saved tensors (the only peak without a GPU)."""


class RowError(ValueError):
    """A row does not match the schema; the message names the row and the field."""


def peak_gib(row: Row) -> float | None:
    found = row.get(PEAKS[row.get("peak") or "allocated"])
    return None if found is None else float(found)


def outcome(row: Row) -> str:
    found: str = row["outcome"]
    return WORDS.get(found, found.replace("missing:", "not installed:"))


def by_case(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def check_row(row: Row, where: str = "row") -> None:
    name = _name(row, where)
    is_ok = row.get("outcome") == "ok"
    check_fields(row, name, _NAMED)
    check_fields(row, name, _MEASURED, is_needed=is_ok)
    check_fields(row, name, _OPTIONAL, is_needed=False)
    if OUTCOME.fullmatch(row["outcome"]) is None:
        raise RowError(f"{name}: field 'outcome' is {row['outcome']!r}; allowed: {OUTCOME.pattern}")
    if row.get("peak") is not None and row["peak"] not in PEAKS:
        raise RowError(f"{name}: field 'peak' is {row['peak']!r}; allowed: {', '.join(PEAKS)}")
    if row.get("date") is not None:
        try:
            datetime.fromisoformat(row["date"])
        except (TypeError, ValueError) as error:
            raise RowError(f"{name}: field 'date' is {row['date']!r}; a time in ISO 8601 is expected") from error
    for step_ms in row["step_ms_all"] or ():
        check_fields({"step_ms_all[]": step_ms}, name, {"step_ms_all[]": _NUMBER})


def check_sweep_row(row: Row, where: str = "row") -> None:
    check_row(row, where)
    name = _name(row, where)
    check_fields(row, name, _SWEPT)
    check_fields(row, name, _SWEPT_MEASURED, is_needed=row["outcome"] == "ok")
    check_fields(row, name, _SWEPT_OPTIONAL, is_needed=False)
    if row["outcome"] == PRUNED:
        check_fields(row, name, {"why": (str,)})
    for field, parts in _PARTS.items():
        check_fields(row[field], f"{name}: {field}", dict.fromkeys(parts, _NUMBER), is_needed=False)


def check_fields(row: Row, name: str, fields: Fields, is_needed: bool = True) -> None:
    for field, types in fields.items():
        if field not in row:
            raise RowError(f"{name}: field {field!r} is missing")
        value = row[field]
        if value is None:
            if is_needed:
                raise RowError(f"{name}: field {field!r} is null")
        elif not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            allowed = " or ".join(one.__name__ for one in types)
            raise RowError(f"{name}: field {field!r} is {value!r}, not of type {allowed}")


def _name(row: Row, where: str) -> str:
    return f"{where} (case {row.get('case')!r}, method {row.get('method')!r})"


def read_rows(path: Path, check: Check = check_row) -> list[Row]:
    """Return the checked rows of a file. Rows from before the planner lack its fields: they become null."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(f"{path}: cannot be read as rows: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RowError(f"{where}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RowError(f"{where}: a JSON object is expected, not {type(row).__name__}")
        if not row.keys() & UNPLANNED.keys():
            row |= UNPLANNED
        check(row, where)
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Sequence[Row], check: Check = check_row) -> None:
    """Check the rows and write them atomically, so that a reader never sees half a file."""
    for number, row in enumerate(rows, 1):
        check(row, f"{path}:{number}")
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
