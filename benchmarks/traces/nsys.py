"""Read the SQLite file of ``nsys export --type sqlite``. Tables and columns not in ``NEEDED`` may differ by version."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from benchmarks.traces.records import NO_LAUNCH, WITHIN_DEVICE, Memcpy, Range, Trace, TraceError, in_order, work_from

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
NEEDED = {
    KERNEL: ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "shortName"),
    MEMCPY: ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind"),
    RUNTIME: ("start", "end", "globalTid", "correlationId"),
    NVTX: ("start", "end", "eventType", "text", "globalTid"),
    "StringIds": ("id", "value"),
}
PUSH_POP = 59
DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""The values of CUPTI's CUpti_ActivityMemcpyKind that occur here."""


def read_nsys(path: Path) -> Trace:
    """Read the trace of the lowest-numbered GPU in the file (rank 0 of a host).

    Raises:
        TraceError: a needed table or column is missing, or there is no range in the file.
    """
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
        try:
            return _Database(path, database).read()
        except sqlite3.DatabaseError as error:
            raise TraceError(f"{path}: not a readable SQLite export of nsys: {error}") from error


class _Database:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self._path = path
        self._database = database
        self._tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        self._check()
        self._strings: dict[int, str] = dict(database.execute("SELECT id, value FROM StringIds"))

    def _check(self) -> None:
        for table, columns in NEEDED.items():
            if table not in self._tables:
                raise TraceError(
                    f"{self._path}: table {table} is missing: the run put nothing into it, or it was not asked for. "
                    "Trace with `nsys profile --trace=cuda,nvtx` and --swap-profile nsys (tools/profile.sh does both)."
                )
            missing = set(columns) - self._columns(table)
            if missing:
                raise TraceError(f"{self._path}: table {table} has no column {', '.join(sorted(missing))}.")

    def _columns(self, table: str) -> set[str]:
        return {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}

    def _select(self, columns: str, table: str, where: str, *values: object) -> Iterable[tuple]:
        return self._database.execute(f"SELECT {columns} FROM {table} WHERE {where}", values)

    def read(self) -> Trace:
        device, process = self._database.execute(
            f"SELECT deviceId, globalPid FROM {KERNEL} ORDER BY deviceId, start LIMIT 1"
        ).fetchone() or (None, None)
        if process is None:
            raise TraceError(f"{self._path}: no kernel in it. Was the captured part of the run on a GPU?")
        # The low 24 bits of a global thread number are the thread's own, the rest is its process.
        in_process = "globalTid & ~0xFFFFFF = ?"
        ranges = self._ranges(in_process, process)
        if not ranges:
            raise TraceError(f"{self._path}: no NVTX range of the process that used GPU {device} in it.")
        origin = min(found.start_ns for found in ranges)
        launches: dict[int, tuple[int, int, int]] = {}
        selected = self._select("correlationId, start, end, globalTid", RUNTIME, in_process, process)
        for number, start, end, thread in selected:
            launch = (start - origin, end - origin, thread)
            launches[number] = min(launches.get(number, launch), launch)
        unknown = (NO_LAUNCH, NO_LAUNCH, 0)
        mine = "deviceId = ? AND globalPid = ?"
        communication = {number for number, text in self._strings.items() if text.startswith("nccl")}
        rows: list[tuple] = []
        for table, name in ((KERNEL, "shortName"), (MEMSET, "0")):
            if table in self._tables:
                columns = f"start, end, streamId, correlationId, {name}"
                for start, end, stream, number, name_id in self._select(columns, table, mine, device, process):
                    launch = launches.get(number, unknown)
                    rows.append((start - origin, end - origin, *launch, stream, name_id in communication, True))
        copies = []
        columns = "copyKind, bytes, start, end, streamId, correlationId"
        for kind, num_bytes, start, end, stream, number in self._select(columns, MEMCPY, mine, device, process):
            launch = launches.get(number, unknown)
            direction = DIRECTIONS.get(kind, f"kind {kind}")
            if direction == WITHIN_DEVICE:
                rows.append((start - origin, end - origin, *launch, stream, False, True))
                continue
            copies.append(Memcpy(direction, num_bytes, start - origin, end - origin, stream, launch[0], launch[2]))
        shifted = [Range(r.name, r.start_ns - origin, r.end_ns - origin, r.thread) for r in ranges]
        return Trace("nsys", False, work_from(rows), copies, in_order(shifted))

    def _ranges(self, where: str, process: int) -> list[Range]:
        """Return the push/pop ranges of the program itself, without those of libraries' domains."""
        columns = self._columns(NVTX)
        text_id = "textId" if "textId" in columns else "NULL"
        own = " AND COALESCE(domainId, 0) = 0" if "domainId" in columns else ""
        complete = f"eventType = {PUSH_POP} AND end IS NOT NULL AND {where}{own}"
        selected = self._select(f"text, {text_id}, start, end, globalTid", NVTX, complete, process)
        return [
            Range(text if text is not None else self._strings.get(number, ""), start, end, thread)
            for text, number, start, end, thread in selected
        ]
