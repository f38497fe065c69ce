"""Open a trace of either format."""

from pathlib import Path

from benchmarks.traces.kineto import read_kineto
from benchmarks.traces.nsys import read_nsys
from benchmarks.traces.records import Trace, TraceError


def read_trace(path: Path) -> Trace:
    if not path.is_file():
        raise TraceError(f"{path}: no such file. Give a trace of torch.profiler or a SQLite export of nsys.")
    with path.open("rb") as file:
        head = file.read(16)
    if head == b"SQLite format 3\0":
        return read_nsys(path)
    if head[:2] == b"\x1f\x8b" or head.lstrip()[:1] == b"{":
        return read_kineto(path)
    raise TraceError(
        f"{path}: neither a trace of torch.profiler (rank-N.json, rank-N.json.gz) nor a SQLite file of nsys. "
        "A .nsys-rep becomes one by `nsys export --type sqlite FILE`."
    )
