"""The schema of sweep rows: the fields of every result row, plus the tried value and its prediction."""

from __future__ import annotations

from benchmarks.rows import PRUNED, Row, RowError, check_row

_NUMBER = (int, float)
_NAMED: dict[str, tuple[type, ...]] = {
    "axis": (str,),
    "unit": (str,),
    "value": (int,),
    "values": (list,),
    "params": (int,),
    "param_bytes": (int,),
    "predicted": (dict,),
    "tiers_gib": (dict,),
    "is_ours": (bool,),
}
"""``values``: all values of the row; a ``pruned`` row has several, from ``value`` on. ``params``: parameters of
``value``, by arithmetic."""
_MEASURED: dict[str, tuple[type, ...]] = {"loss_first": _NUMBER, "loss_last": _NUMBER, "losses": (list,)}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "mfu": _NUMBER, "disk_peak_gib": _NUMBER, "why": (str,), "output_tail": (str,),
}  # fmt: skip
TIERS = ("device", "host", "disk")
PREDICTED = ("device_gib", "host_gib", "disk_gib", "static_gib")


def is_sweep(row: Row) -> bool:
    """Return whether a row belongs to a sweep."""
    return "axis" in row


def check(row: Row, where: str = "row") -> None:
    """Raise ``RowError`` unless ``row`` matches the schema of sweep rows."""
    check_row(row, where)
    name = f"{where} (case {row['case']!r}, method {row['method']!r})"
    worked, is_pruned = row["outcome"] == "ok", row["outcome"] == PRUNED
    for fields, is_needed in ((_NAMED, True), (_MEASURED, worked), (_OPTIONAL, False)):
        for field, types in fields.items():
            if field not in row:
                raise RowError(f"{name}: field {field!r} is missing")
            value = row[field]
            if value is None and (is_needed or (is_pruned and field == "why")):
                raise RowError(f"{name}: field {field!r} is null")
            if value is not None and (not isinstance(value, types) or (type(value) is bool) != (types == (bool,))):
                allowed = " or ".join(one.__name__ for one in types)
                raise RowError(f"{name}: field {field!r} is {value!r}, not of type {allowed}")
    for field, names in (("predicted", PREDICTED), ("tiers_gib", TIERS)):
        for part in names:
            value = row[field].get(part, "missing")
            if value is not None and type(value) not in _NUMBER:
                raise RowError(f"{name}: field {field}.{part} is {value!r}; a number or null is expected")
