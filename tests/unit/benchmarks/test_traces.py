"""Traces in both formats: every planted fault is found with its size, figures are exact, nothing in a correct run."""

import gzip
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.machine import ROOT
from benchmarks.traces.analysis import Analysis, analyse, findings
from benchmarks.traces.checks import RULES
from benchmarks.traces.reader import read_trace
from benchmarks.traces.records import TraceError
from benchmarks.traces.report import save
from tests.unit.benchmarks.made_traces import AUTOGRAD, COMPUTE, IN, MAIN, MS, OUT, US, Device, Made, Plan, train

MIB = 1 << 20
KINDS = ("kineto", "nsys")
SMALL = Plan(num_steps=1, num_layers=3, num_micro_batches=1, num_pieces=1, sites=("mlp.linear_fc1/0",))
# Kernels of SMALL: embedding (0), two a layer (1-6), backward of layers 2, 1, 0 (7-15), optimizer (16).
LAST_OF_LAYER_0, FIRST_AFTER_RELEASE_0, BEFORE_PREFETCH_0, FIRST_OF_BACKWARD_0 = 2, 5, 9, 13


def judged(made: Made, folder: Path, kind: str = "kineto", summary: dict[str, Any] | None = None) -> Analysis:
    (folder / "trace.sqlite").unlink(missing_ok=True)
    return analyse(read_trace(made.write(folder, kind)), summary)


def kernels(made: Made) -> list[Device]:
    return [found for found in made.device if found.what == "kernel"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_correct_run_is_clean(tmp_path: Path, kind: str) -> None:
    plan = Plan()
    made, summary = train(plan)
    analysis = judged(made, tmp_path, kind, summary)
    assert analysis.is_clean
    num_storages = plan.num_steps * plan.num_micro_batches * (plan.num_layers - 1) * len(plan.sites)
    assert analysis.ordering.num_checked == dict.fromkeys(RULES, num_storages)
    del summary["steps"][0]["num_in_copies"]
    summary["steps"][0]["num_out_copies"] -= 4
    summary["steps"][1]["iteration"] = 6
    said = ("step 4: num_out_copies is ", "step 4: the summary has no num_in_copies", "step 5 is not in the summary")
    mismatches = judged(made, tmp_path, kind, summary).mismatches
    assert all(text.startswith(words) for text, words in zip(mismatches, said, strict=True)), mismatches


def too_early_out(made: Made) -> None:
    made.copies("DtoH")[0].start = kernels(made)[LAST_OF_LAYER_0].end - 7 * US


def used_too_early(made: Made) -> None:
    made.copies("HtoD")[1].end = kernels(made)[FIRST_OF_BACKWARD_0].start + 7 * US


def reused_too_early(made: Made) -> None:
    made.copies("DtoH")[0].end = kernels(made)[FIRST_AFTER_RELEASE_0].start + 7 * US


def back_before_out(made: Made) -> None:
    """Nothing is released in this run, so only the order of the two copies is wrong."""
    made.ranges = [found for found in made.ranges if not found[0].startswith("release")]
    made.copies("DtoH")[1].end = made.copies("HtoD")[0].start + 7 * US


def buffer_still_in_use(made: Made) -> None:
    made.copies("HtoD")[1].start = kernels(made)[BEFORE_PREFETCH_0].end - 7 * US


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rule", "plant", "layer"),
    [
        ("out_after_compute", too_early_out, 0), ("in_before_use", used_too_early, 0),
        ("out_before_reuse", reused_too_early, 0), ("in_after_out", back_before_out, 1),
        ("in_after_compute", buffer_still_in_use, 0),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found(
    tmp_path: Path, kind: str, rule: str, plant: Callable[[Made], None], layer: int
) -> None:
    made, _ = train(SMALL)
    plant(made)
    analysis = judged(made, tmp_path, kind)
    (violation,) = analysis.ordering.violations
    assert (violation.rule, violation.site) == (rule, f"layers.{layer}/mlp.linear_fc1/0")
    assert (violation.by_us, violation.step, violation.group) == (7.0, 4, f"layers.{layer} mb0")
    assert not analysis.is_clean


def rename(made: Made, change: Callable[[str], str | None]) -> None:
    """Change the names of ranges; ``None`` removes one."""
    made.ranges = [(name, *rest) for old, *rest in made.ranges if (name := change(old)) is not None]


KEPT = "layers.1/mlp.linear_fc1/0"


def without_launch_thread(made: Made) -> None:
    first = made.copies("DtoH")[0].number
    made.launches = [(n, s, e, AUTOGRAD if n == first else thread) for n, s, e, thread in made.launches]


def never_out(made: Made) -> None:
    made.range("copy_in layers.9/mlp.linear_fc1/0 mb0 4194304", 30 * US, 33 * US, MAIN)
    made.run("HtoD", 31 * US, MS, 2 * MS, IN, MAIN, 4 << 20)


def on_compute_stream(made: Made) -> None:
    for copy in made.copies("DtoH"):
        copy.stream = COMPUTE


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (without_launch_thread, ["belongs to no range", "announced 4194304 bytes, its copies moved 0",
                                 *["copy out before"] * 3]),
        (never_out, ["copy_in layers.9/mlp.linear_fc1/0 mb0 lies in no group's range",
                     "step 4: copy_in layers.9/mlp.linear_fc1/0 mb0 without a copy out before"]),
        (on_compute_stream, ["swap copies run on stream 7, which computes: nothing can overlap"]),
        (lambda made: rename(made, lambda name: None if name == f"wait {KEPT} mb0" else name),
         ["was copied in, but nothing waited for that copy"]),
        (lambda made: rename(made, lambda name: None if name == f"release {KEPT} mb0" else name),
         ["was copied in, but never released after its copy out"]),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_a_mismatch(tmp_path: Path, plant: Callable[[Made], None], said: list[str]) -> None:
    made, _ = train(SMALL)
    plant(made)
    for kind in KINDS:
        mismatches = judged(made, tmp_path, kind).mismatches
        assert len(mismatches) == len(said)
        assert all(words in text for words, text in zip(said, mismatches, strict=True)), mismatches


def by_hand() -> Made:
    """A trace of two layers of 4 ms each way, with one storage of 8 MiB. In ms of the device's time::

        compute  |F0 1-5|F1 5-9|B1 9-11|  stall 11-14.5  |  15-19 B0|  23-24 optimizer|
        out             |5 ---- 9|              (release after F1)
        in                            |10.5 ---- 14.5|
    """
    made = Made()
    made.range("step 7", 0, 30 * MS)
    made.range("forward layers.0 mb0", 10 * US, 100 * US)
    made.run("kernel", 20 * US, 1 * MS, 5 * MS)
    made.range("swap_out layers.0 mb0 8 MiB", 40 * US, 90 * US)
    made.range("copy_out layers.0/mlp.linear_fc1/0 mb0 8388608", 50 * US, 80 * US)
    made.run("DtoH", 60 * US, 5 * MS, 9 * MS, OUT, num_bytes=8 * MIB)
    made.range("memory 100", 95 * US, 95 * US)
    made.range("forward layers.1 mb0", 110 * US, 190 * US)
    made.run("kernel", 120 * US, 5 * MS, 9 * MS - 5 * US)
    made.range("memory 300", 130 * US, 130 * US)
    made.range("release layers.0/mlp.linear_fc1/0 mb0", 140 * US, 150 * US)
    made.range("backward layers.1 mb0", 200 * US, 290 * US, AUTOGRAD)
    made.run("kernel", 210 * US, 9 * MS, 11 * MS, thread=AUTOGRAD)
    made.range("prefetch layers.0 mb0 8 MiB", 10 * MS, 10 * MS + 90 * US, AUTOGRAD)
    made.range("copy_in layers.0/mlp.linear_fc1/0 mb0 8388608", 10 * MS + 10 * US, 10 * MS + 80 * US, AUTOGRAD)
    made.run("HtoD", 10 * MS + 20 * US, 11 * MS, 14_500 * US, IN, AUTOGRAD, 8 * MIB)
    made.range("backward layers.0 mb0", 10_200 * US, 10_600 * US, AUTOGRAD)
    made.range("wait layers.0/mlp.linear_fc1/0 mb0", 10_300 * US, 10_400 * US, AUTOGRAD)
    made.run("kernel", 10_500 * US, 15 * MS, 19 * MS, thread=AUTOGRAD)
    made.range("Optimizer.step", 20 * MS, 29 * MS)
    made.run("kernel", 22 * MS, 23 * MS, 24 * MS)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_figures_that_can_be_computed_by_hand(tmp_path: Path, kind: str) -> None:
    analysis = judged(by_hand(), tmp_path, kind)
    out, back = analysis.links["out"], analysis.links["in"]
    # Out: 4 ms under compute (the gap of 5 µs is closed). In: 3.5 ms in which compute stood still.
    assert (out.hidden_share, back.hidden_share, analysis.hidden_share) == (1.0, 0.0, 4 / 7.5)
    assert (out.num_copies, out.num_bytes, out.copy_ms, out.busy_share) == (1, 8 * MIB, 4.0, 4 / 30)
    assert (out.gb_per_s, back.gb_per_s) == (8 * MIB / 4e6, 8 * MIB / 3.5e6)
    # Release: compute idled from 8.995 ms, the copy ended at 9.
    assert [(stall.name, stall.ms) for stall in analysis.stalls] == [
        ("release layers.0/mlp.linear_fc1/0 mb0", 0.005), ("wait layers.0/mlp.linear_fc1/0 mb0", 3.5),
    ]  # fmt: skip
    assert [(gap.start_ms, gap.ms, gap.owner, gap.stalled_ms) for gap in analysis.gaps] == [
        (10.0, 4.0, "wait layers.0/mlp.linear_fc1/0 mb0", 3.5), (18.0, 4.0, "host: Optimizer.step", 0.0),
    ]  # fmt: skip
    (step,) = analysis.steps
    assert (step.step, step.duration_ms, step.d2h_ms, step.h2d_ms) == (7, 30.0, 4.0, 3.5)
    assert (step.compute_busy_ms, step.stalled_ms, step.peak_memory_bytes) == (4 + 4 + 2 + 4 + 1, 3.505, 300)
    # Out: from the end of F0 (5) to the end of F1 (8.995) at 2 MiB/ms, of 8 MiB. In: from the start of B1 (9) to
    # the start of B0 (15), of which compute worked 2 ms and waited for the rest: 2 ms for 3.5 ms of copying.
    assert analysis.predicted == {"out": pytest.approx(3.995 / 4, abs=1e-12), "in": pytest.approx(2 / 3.5, abs=1e-12)}


def test_both_formats_give_the_same_findings(tmp_path: Path) -> None:
    made, summary = train()
    made.run("kernel", 10, MS // 8, MS // 4, stream=99, name="ncclDevKernel_AllReduce")
    made.run("memset", 20, MS // 2, MS, stream=COMPUTE)
    made.run("DtoD", 30, MS // 2, MS, stream=COMPUTE, num_bytes=5 << 20)
    kinds = ("kineto", "kineto-plain", "nsys")
    found = {kind: findings(judged(made, tmp_path, kind, summary)) for kind in kinds}
    assert [found[kind].pop("format") for kind in kinds] == ["kineto", "kineto", "nsys"]
    assert found["kineto"] == found["nsys"] == found["kineto-plain"]
    assert found["nsys"]["clean"]
    assert found["nsys"]["streams"] == {"num_compute": 2, "main": COMPUTE, "copies_out": [OUT], "copies_in": [IN]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"trace: no such file"),
        (b"PK\x03\x04 a report of nsys", "neither a trace of torch.profiler"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "not a whole trace"),
        (b'{"traceEvents": []}', "no named range"),
        (b"SQLite format 3\0 and then nothing", "not a readable SQLite"),
        ("DROP TABLE NVTX_EVENTS", "table NVTX_EVENTS is missing.*--trace=cuda,nvtx"),
        ("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN correlationId", "no column correlationId"),
        ("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL", "no kernel in it"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes | str | None, reason: str) -> None:
    path = tmp_path / "trace"
    if isinstance(content, str):
        path = train()[0].write(tmp_path, "nsys")
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(content)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)


def test_the_tool_fails_with_the_reason_and_overwrites_nothing_that_it_reads(tmp_path: Path) -> None:
    made, summary = train(Plan(bytes_per_ns=1.0, waits=False))
    summary["steps"][0]["num_in_copies"] = 1
    path = tmp_path / "run.json"
    path.write_text(json.dumps(summary))
    trace = made.write(tmp_path, "kineto").rename(tmp_path / "trace.perfetto.json.gz")
    for more, code, said in (
        (["--output", tmp_path / "out"], 1, "step 4: num_in_copies is 24 in the trace, 1 in the s"),
        ([], 2, f"{trace.name} is written there; name another --output folder"),
    ):
        command = [sys.executable, ROOT / "tools" / "analyze_trace.py", trace, "--summary", path, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert said in done.stdout + done.stderr
    assert not json.loads((tmp_path / "out" / "findings.json").read_text())["clean"]


def test_every_copy_is_listed_and_perfetto_gets_lanes_slices_and_counters(tmp_path: Path) -> None:
    made, _ = train()
    save(judged(made, tmp_path, "nsys"), tmp_path)
    head, first, *rest = (tmp_path / "copies.csv").read_text().splitlines()
    assert len(rest) + 1 == len(made.copies("DtoH")) + len(made.copies("HtoD")) == 96
    row = dict(zip(head.split(","), first.split(","), strict=True))
    found = [row[name] for name in ("step", "group", "direction", "stream", "site", "bytes")]
    assert found == ["4", "layers.0 mb0", "out", "20", "layers.0/mlp.linear_fc1/0", str(2 << 20)]
    assert float(row["start_ms"]) == made.copies("DtoH")[0].start / MS
    events = json.loads(gzip.decompress((tmp_path / "trace.perfetto.json.gz").read_bytes()))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    out = [event for event in events if event["ph"] == "X" and lanes[event["tid"]] == "copies out (D2H)"]
    assert len(out) == len(made.copies("DtoH"))
    assert {event["args"]["bytes"] >> 30 for event in events if event["ph"] == "C"} == {9, 10, 11, 12, 13}
