"""Write result files: each row as it comes, resumable, and never by two programs at once."""

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rows import Check, Row, check_row, read_rows, write_rows


class StoreError(ValueError):
    """A result file cannot be written or continued; the message says what to change."""


class ResultStore:
    """The rows of one result file, in memory only without ``path``. Every change is written at once."""

    def __init__(self, path: Path | None, *, resume: bool, check: Check = check_row) -> None:
        self._path = path
        self._check = check
        self.rows: list[Row] = []
        if path is None or not path.exists():
            return
        if not resume:
            raise StoreError(f"--output {path} exists: continue it with --resume, or name another file")
        self.rows = read_rows(path, check)

    def append(self, row: Row) -> None:
        self.replace([*self.rows, row])

    def replace(self, rows: Sequence[Row]) -> None:
        if self._path is not None:
            write_rows(self._path, rows, self._check)
        self.rows = list(rows)

    def refuse(self, reason: str) -> StoreError:
        return StoreError(f"--resume: {self._path} has {reason}. Name another --output.")

    def require_same(self, label: str, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for field, value in now.items():
            if there[field] != value:
                raise self.refuse(
                    f"{field} {there[field]!r} for {label}, this run has {value!r}: rows of one file must be comparable"
                )


def check_beside(path: Path) -> None:
    for other in (path.with_suffix(".md"), path.with_suffix(".png")):
        if other.exists() and (not path.exists() or not path.stat().st_size or not other.is_file()):
            raise StoreError(f"--output {path}: {other} is there, and would be overwritten. Name another file.")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a result file: two programs that rewrite it would lose each other's rows."""
    if path.exists() and not path.is_file():
        raise StoreError(f"--output {path} is no file")
    real = path.resolve()  # links to one file must share its lock
    lock = real.with_name(f".{real.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = lock.open("w")
    except OSError as error:
        raise StoreError(f"--output {path} cannot be written ({error.strerror}); name another file") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = lock.exists() and lock.samefile(f"/proc/self/fd/{file.fileno()}")
        except BlockingIOError:
            is_ours = False
        if not is_ours:  # locked by another program, or removed by it since we opened it
            raise StoreError(f"--output {path}: another run is writing it; wait for its end, or name another file")
        try:
            yield
        finally:
            lock.unlink()
