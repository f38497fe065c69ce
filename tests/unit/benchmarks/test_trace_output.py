"""Files and printed output of the analysis: pictures, Perfetto trace, tables, exit status."""

from __future__ import annotations

import csv
import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.traces.analysis import analyse
from benchmarks.traces.reader import read_trace
from benchmarks.traces.records import TraceError
from benchmarks.traces.report import save
from benchmarks.traces.scene import scene_of
from tests.unit.benchmarks.made_traces import MS, Made, Plan, train

ROOT = Path(__file__).resolve().parents[3]


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "analyze_trace.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write_run(folder: Path, made: Made, summary: object) -> tuple[Path, Path]:
    path = folder / "run.json"
    path.write_text(json.dumps(summary))
    return made.write(folder, "kineto"), path


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_the_tool_judges_a_clean_run_and_saves_everything(tmp_path: Path):
    trace, summary = write_run(tmp_path, *train())
    done = run_tool(trace, "--summary", summary)
    assert done.returncode == 0, done.stderr
    assert "clean: every copy ran in order; number and bytes match the summary" in done.stdout
    saved = json.loads((tmp_path / "findings.json").read_text())
    assert saved["clean"]
    assert saved["compared_with_summary"]
    assert png_size(tmp_path / "step.png")[0] == 1600


@pytest.mark.parametrize("renamed", ["findings.json", "trace.perfetto.json.gz"])
def test_what_it_reads_is_not_overwritten(tmp_path: Path, renamed: str):
    trace, summary = write_run(tmp_path, *train())
    taken = tmp_path / renamed
    (summary if renamed.startswith("findings") else trace).rename(taken)
    before = taken.read_bytes()
    words = (trace, "--summary", taken) if renamed.startswith("findings") else (taken, "--summary", summary)
    done = run_tool(*words)
    assert done.returncode == 2
    assert f"{renamed} is written there; name another --output folder" in done.stderr
    assert taken.read_bytes() == before
    assert run_tool(*words, "--output", tmp_path / "out").returncode == 0


def test_the_tool_fails_with_the_reason(tmp_path: Path):
    made, summary = train(Plan(bytes_per_ns=1.0, waits=False))
    summary["steps"][0]["num_in_copies"] = 1
    trace, path = write_run(tmp_path, made, summary)
    done = run_tool(trace, "--summary", path, "--output", tmp_path / "out")
    assert done.returncode == 1
    assert "MISMATCHES: 1" in done.stdout
    assert "step 4: num_in_copies is 24 in the trace, 1 in the summary" in done.stdout
    assert "OUT OF ORDER: 24" in done.stdout
    assert "in_before_use: step 4, layers." in done.stdout
    assert "4 more in findings.json" in done.stdout
    assert not json.loads((tmp_path / "out" / "findings.json").read_text())["clean"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["absent.json"], "no such file"),
        (["{trace}", "--summary", "{trace}"], "not a summary"),
        (["{trace}", "--summary", "absent.json"], "not a summary"),
        (["{trace}", "--step", "9"], "step 9 is not in the trace. Choose one of: 4, 5"),
    ],
)
def test_the_tool_refuses_what_it_cannot_judge(tmp_path: Path, arguments: list[str], reason: str):
    trace, _ = write_run(tmp_path, *train())
    done = run_tool(*(word.format(trace=trace) for word in arguments))
    assert done.returncode == 2
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_every_copy_is_listed(tmp_path: Path):
    made, _ = train()
    save(analyse(read_trace(made.write(tmp_path, "nsys"))), tmp_path)
    with (tmp_path / "copies.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(made.copies("DtoH")) + len(made.copies("HtoD")) == 96
    first = rows[0]
    assert (first["step"], first["group"], first["direction"]) == ("4", "layers.0 mb0", "out")
    assert (first["site"], first["bytes"], first["stream"]) == ("layers.0/mlp.linear_fc1/0", str(2 << 20), "20")
    copy = made.copies("DtoH")[0]
    assert float(first["start_ms"]) == copy.start / MS
    assert float(first["gb_per_s"]) == round((2 << 20) / (copy.end - copy.start), 3)


def test_perfetto_gets_named_lanes_slices_and_counters(tmp_path: Path):
    made, _ = train()
    save(analyse(read_trace(made.write(tmp_path, "kineto"))), tmp_path)
    events = json.loads(gzip.decompress((tmp_path / "trace.perfetto.json.gz").read_bytes()))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == ["compute", "copies out (D2H)", "copies in (H2D)", "engine (host)"]
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["tid"] in lanes for event in slices)
    out = [event for event in slices if lanes[event["tid"]] == "copies out (D2H)"]
    assert len(out) == len(made.copies("DtoH"))
    assert out[0]["args"] == {
        "group": "layers.0 mb0", "site": "layers.0/mlp.linear_fc1/0", "why": "swap_out", "bytes": 2 << 20, "GB/s": 50.0
    }  # fmt: skip
    assert {event["args"]["bytes"] >> 30 for event in events if event["ph"] == "C"} == {9, 10, 11, 12, 13}


def test_a_picture_is_larger_where_one_micro_batch_is_drawn_again(tmp_path: Path):
    heights = []
    for num_micro_batches in (1, 4):
        made, _ = train(Plan(num_micro_batches=num_micro_batches))
        save(analyse(read_trace(made.write(tmp_path, "kineto"))), tmp_path)
        heights.append(png_size(tmp_path / "step.png")[1])
    assert heights[1] > 1.4 * heights[0]


def test_the_emulation_is_drawn_too(tmp_path: Path):
    made, _ = train(emulated=True)
    saved = save(analyse(read_trace(made.write(tmp_path, "kineto"))), tmp_path / "new")
    assert all(path.stat().st_size > 1000 for path in saved)


def test_memory_marks_stand_where_the_next_kernel_starts(tmp_path: Path):
    made, _ = train(Plan(num_steps=1, num_layers=2, num_micro_batches=1))
    analysis = analyse(read_trace(made.write(tmp_path, "kineto")))
    scene = scene_of(analysis)
    kernels = [found for found in made.device if found.what == "kernel"]
    starts = {found.start for found in kernels}
    assert [num_bytes >> 30 for _, num_bytes in scene.memory] == [10, 11, 10, 9]
    assert {moment - analysis.engine.steps[0].start_ns for moment, _ in scene.memory} <= starts
    assert scene.memory[0][0] == kernels[3].start


def test_only_traced_steps_can_be_drawn(tmp_path: Path):
    analysis = analyse(read_trace(train()[0].write(tmp_path, "kineto")))
    assert scene_of(analysis).step.number == 5
    assert scene_of(analysis, 4).step.number == 4
    with pytest.raises(TraceError, match="Choose one of: 4, 5"):
        scene_of(analysis, 1)
