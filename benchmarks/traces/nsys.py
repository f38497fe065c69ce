"""Read the SQLite file of ``nsys export --type sqlite``. Tables and columns not in ``NEEDED`` may differ by version."""

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks.traces.records import Activities, Range, Trace, TraceError, in_order, work_from

KERNEL, MEMCPY, MEMSET, RUNTIME = (f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME"))
NVTX = "NVTX_EVENTS"
ON_DEVICE = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
NEEDED = {
    KERNEL: (*ON_DEVICE, "shortName"), MEMCPY: (*ON_DEVICE, "bytes", "copyKind"),
    RUNTIME: ("start", "end", "globalTid", "correlationId"), NVTX: ("start", "end", "eventType", "text", "globalTid"),
    "StringIds": ("id", "value"),
}  # fmt: skip
PUSH_POP = 59
DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
"""The values of CUPTI's CUpti_ActivityMemcpyKind that occur here."""
MINE = "deviceId = ? AND globalPid = ?"
IN_PROCESS = "globalTid & ~0xFFFFFF = ?"
"""The low 24 bits of a global thread number are the thread's own, the rest is its process."""


def read_nsys(path: Path) -> Trace:
    """Read the trace of the lowest-numbered GPU in the file (rank 0 of a host)."""
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
        for table, columns in NEEDED.items():
            if table not in self._tables:
                raise TraceError(
                    f"{path}: table {table} is missing: the run put nothing into it, or it was not asked for. "
                    "Trace with `nsys profile --trace=cuda,nvtx` and --swap-profile nsys (tools/profile.sh does both)."
                )
            if missing := set(columns) - self._columns(table):
                raise TraceError(f"{path}: table {table} has no column {', '.join(sorted(missing))}.")
        self._strings: dict[int, str] = dict(database.execute("SELECT id, value FROM StringIds"))

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
        ranges = self._ranges(process)
        if not ranges:
            raise TraceError(f"{self._path}: no NVTX range of the process that used GPU {device} in it.")
        origin = min(found.start_ns for found in ranges)
        launches: dict[int, tuple[int, int, int]] = {}
        for number, start, end, thread in self._select(
            "correlationId, start, end, globalTid", RUNTIME, IN_PROCESS, process
        ):
            launch = (start - origin, end - origin, thread)
            launches[number] = min(launches.get(number, launch), launch)
        activities = Activities(launches)
        for table, name in ((KERNEL, "shortName"), (MEMSET, "0")):
            columns = f"start, end, streamId, correlationId, {name}"
            rows = self._select(columns, table, MINE, device, process) if table in self._tables else []
            for start, end, stream, number, text in rows:
                is_comm = self._strings.get(text, "").startswith("nccl")
                activities.add_work((start - origin, end - origin), stream, number, is_comm)
        columns = "copyKind, bytes, start, end, streamId, correlationId"
        for kind, num_bytes, start, end, stream, number in self._select(columns, MEMCPY, MINE, device, process):
            direction = DIRECTIONS.get(kind, f"kind {kind}")
            activities.add_copy(direction, num_bytes, (start - origin, end - origin), stream, number)
        shifted = [replace(found, start_ns=found.start_ns - origin, end_ns=found.end_ns - origin) for found in ranges]
        return Trace("nsys", False, work_from(activities.rows), activities.copies, in_order(shifted))

    def _ranges(self, process: int) -> list[Range]:
        """Return the push/pop ranges of the program itself, without those of libraries' domains."""
        columns = self._columns(NVTX)
        text_id = "textId" if "textId" in columns else "NULL"
        own = " AND COALESCE(domainId, 0) = 0" if "domainId" in columns else ""
        complete = f"eventType = {PUSH_POP} AND end IS NOT NULL AND {IN_PROCESS}{own}"
        selected = self._select(f"text, {text_id}, start, end, globalTid", NVTX, complete, process)
        return [
            Range(text if text is not None else self._strings.get(number, ""), start, end, thread)
            for text, number, start, end, thread in selected
        ]
