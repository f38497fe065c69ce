"""Both trace formats give the same result; unusable files are refused with a reason."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.traces.analysis import analyse, findings
from benchmarks.traces.reader import read_trace
from benchmarks.traces.records import TraceError
from tests.unit.benchmarks.made_traces import COMPUTE, IN, MS, OUT, Made, Plan, train


def test_both_formats_give_the_same_findings(tmp_path: Path):
    made, summary = train()
    made.run("kernel", 10, MS // 8, MS // 4, stream=99, name="ncclDevKernel_AllReduce")
    made.run("memset", 20, MS // 2, MS, stream=COMPUTE)
    made.run("DtoD", 30, MS // 2, MS, stream=COMPUTE, num_bytes=5 << 20)
    found = {}
    for kind in ("kineto", "kineto-plain", "nsys"):
        found[kind] = findings(analyse(read_trace(made.write(tmp_path, kind)), summary))
    assert found["kineto"].pop("format") == found["kineto-plain"].pop("format") == "kineto"
    assert found["nsys"].pop("format") == "nsys"
    assert found["kineto"] == found["nsys"] == found["kineto-plain"]
    assert found["nsys"]["clean"]
    assert found["nsys"]["streams"] == {"num_compute": 2, "main": COMPUTE, "copies_out": [OUT], "copies_in": [IN]}


def test_every_copy_is_found_with_its_group_and_site(tmp_path: Path):
    made, _ = train(Plan(num_steps=1, num_layers=2, num_micro_batches=1))
    for kind in ("kineto", "nsys"):
        engine = analyse(read_trace(made.write(tmp_path, kind))).engine
        (fc1_out, qkv_out, fc1_in, _) = engine.copies
        assert [fc1_out.group, fc1_out.site, fc1_out.why] == ["layers.0 mb0", "layers.0/mlp.linear_fc1/0", "swap_out"]
        assert [fc1_in.direction, fc1_in.num_bytes, fc1_in.why] == ["in", 4 << 20, "prefetch"]
        assert [piece.num_bytes for piece in qkv_out.pieces] == [2 << 20, 2 << 20]
        times = [piece.end_ns - piece.start_ns for piece in qkv_out.pieces]
        assert times == [round((2 << 20) / 50)] * 2
        assert len(engine.other_copies) == 1  # the loss


def test_the_emulation_is_read_too(tmp_path: Path):
    made, summary = train(emulated=True)
    trace = read_trace(made.write(tmp_path, "kineto"))
    analysis = analyse(trace, summary)
    assert trace.is_emulated
    assert analysis.is_clean
    assert trace.work.is_outer.sum() * 2 == len(trace.work)
    assert analysis.links["out"].num_bytes == analysis.links["in"].num_bytes == 2 * 2 * 3 * 2 * (4 << 20)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"PK\x03\x04 a report of nsys", "neither a trace of torch.profiler"),
        (b"", "neither a trace of torch.profiler"),
        (b'{"other": 1}', "traceEvents"),
        (b'{"traceEvents": [', "not a whole trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "not a whole trace"),
        (b'{"traceEvents": []}', "no named range"),
        (b"SQLite format 3\0 and then nothing", "not a readable SQLite"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TraceError, match=r"absent\.json: no such file"):
        read_trace(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("DROP TABLE NVTX_EVENTS", "table NVTX_EVENTS is missing.*--trace=cuda,nvtx"),
        ("DROP TABLE CUPTI_ACTIVITY_KIND_MEMCPY", "table CUPTI_ACTIVITY_KIND_MEMCPY is missing"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN correlationId", "no column correlationId"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "no kernel in it"),
        ("DELETE FROM NVTX_EVENTS WHERE end IS NOT NULL", "no NVTX range"),
    ],
)
def test_a_database_that_lacks_something_needed_is_refused(tmp_path: Path, change: str, reason: str):
    path = train()[0].write(tmp_path, "nsys")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(change)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)


@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE CUPTI_ACTIVITY_KIND_MEMSET",
        "ALTER TABLE NVTX_EVENTS ADD COLUMN jsonText TEXT",
        "UPDATE NVTX_EVENTS SET domainId = NULL WHERE domainId = 0",
    ],
)
def test_other_versions_of_the_database_are_read(tmp_path: Path, change: str):
    made, summary = train()
    path = made.write(tmp_path, "nsys")
    before = findings(analyse(read_trace(path), summary))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(change)
    assert findings(analyse(read_trace(path), summary)) == before


@pytest.mark.parametrize(("lacking", "reason"), [("step ", "no range 'step N'"), ("copy_out ", "no range 'copy_out")])
@pytest.mark.parametrize("kind", ["kineto", "nsys"])
def test_a_trace_without_steps_or_swapping_is_refused(tmp_path: Path, kind: str, lacking: str, reason: str):
    made, _ = train()
    made.ranges = [found for found in made.ranges if not found[0].startswith(lacking)]
    with pytest.raises(TraceError, match=reason):
        analyse(read_trace(made.write(tmp_path, kind)))


def test_of_nested_calls_with_one_number_the_outer_one_is_the_launch(tmp_path: Path):
    made = Made()
    made.range("step 1", 0, 10 * MS)
    made.run("kernel", 5_000, MS, 2 * MS)
    path = made.write(tmp_path, "kineto-plain")
    content = json.loads(path.read_text())
    outer = next(event for event in content["traceEvents"] if event.get("cat") == "cuda_runtime")
    content["traceEvents"].append({**outer, "cat": "cuda_driver", "ts": outer["ts"] + 0.25, "dur": 0.5})
    path.write_text(json.dumps(content))
    work = read_trace(path).work
    assert (work.launch_start_ns.tolist(), work.launch_end_ns.tolist()) == ([5_000], [6_000])
