"""Every planted fault is found with its size, and nothing is found in a correct run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.traces.analysis import Analysis, analyse, findings
from benchmarks.traces.checks import RULES
from benchmarks.traces.reader import read_trace
from tests.unit.benchmarks.made_traces import AUTOGRAD, IN, MAIN, MS, OUT, US, Device, Made, Plan, train

KINDS = ("kineto", "nsys")
SMALL = Plan(num_steps=1, num_layers=3, num_micro_batches=1, num_pieces=1, sites=("mlp.linear_fc1/0",))
# Kernels of SMALL: embedding (0), two a layer (1-6), backward of layers 2, 1, 0 (7-15), optimizer (16).
LAST_OF_LAYER_0, FIRST_AFTER_RELEASE_0, BEFORE_PREFETCH_0, FIRST_OF_BACKWARD_0 = 2, 5, 9, 13


def judged(made: Made, folder: Path, kind: str, summary: dict[str, Any] | None = None) -> Analysis:
    return analyse(read_trace(made.write(folder, kind)), summary)


def kernels(made: Made) -> list[Device]:
    return [found for found in made.device if found.what == "kernel"]


def move(copy: Device, start: int, end: int) -> None:
    copy.start, copy.end = start, end


def too_early_out(made: Made) -> None:
    copy = made.copies("DtoH")[0]
    move(copy, kernels(made)[LAST_OF_LAYER_0].end - 7 * US, copy.end)


def used_too_early(made: Made) -> None:
    copy = made.copies("HtoD")[1]
    move(copy, copy.start, kernels(made)[FIRST_OF_BACKWARD_0].start + 7 * US)


def reused_too_early(made: Made) -> None:
    copy = made.copies("DtoH")[0]
    move(copy, copy.start, kernels(made)[FIRST_AFTER_RELEASE_0].start + 7 * US)


def back_before_out(made: Made) -> None:
    """Nothing is released in this run, so only the order of the two copies is wrong."""
    made.ranges = [found for found in made.ranges if not found[0].startswith("release")]
    out, back = made.copies("DtoH")[1], made.copies("HtoD")[0]
    move(out, out.start, back.start + 7 * US)


def buffer_still_in_use(made: Made) -> None:
    copy = made.copies("HtoD")[1]
    move(copy, kernels(made)[BEFORE_PREFETCH_0].end - 7 * US, copy.end)


@pytest.mark.parametrize(("kind", "emulated"), [("kineto", False), ("nsys", False), ("kineto", True)])
def test_a_correct_run_is_clean(tmp_path: Path, kind: str, emulated: bool):
    plan = Plan()
    made, summary = train(plan, emulated)
    analysis = judged(made, tmp_path, kind, summary)
    assert analysis.is_clean
    num_storages = plan.num_steps * plan.num_micro_batches * (plan.num_layers - 1) * len(plan.sites)
    assert analysis.ordering.num_checked == dict.fromkeys(RULES, num_storages)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rule", "plant", "site"),
    [
        ("out_after_compute", too_early_out, "layers.0/mlp.linear_fc1/0"),
        ("in_before_use", used_too_early, "layers.0/mlp.linear_fc1/0"),
        ("out_before_reuse", reused_too_early, "layers.0/mlp.linear_fc1/0"),
        ("in_after_out", back_before_out, "layers.1/mlp.linear_fc1/0"),
        ("in_after_compute", buffer_still_in_use, "layers.0/mlp.linear_fc1/0"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, kind: str, rule: str, plant: Callable[[Made], None], site: str):
    made, _ = train(SMALL)
    plant(made)
    analysis = judged(made, tmp_path, kind)
    assert [(found.rule, found.site) for found in analysis.ordering.violations] == [(rule, site)]
    (violation,) = analysis.ordering.violations
    assert (violation.by_us, violation.step, violation.group) == (7.0, 4, f"{site.split('/')[0]} mb0")
    assert not analysis.is_clean
    assert RULES[rule] in str(violation)


def test_what_the_clock_cannot_tell_is_no_violation(tmp_path: Path):
    made, _ = train(SMALL)
    copy = made.copies("DtoH")[0]
    move(copy, copy.start - US, copy.end)
    analysis = judged(made, tmp_path, "kineto")
    assert analysis.is_clean
    assert analysis.ordering.least_margin_us["out_after_compute"] == -1.0


@pytest.mark.parametrize("emulated", [False, True])
def test_a_forgotten_wait_is_found_when_the_link_is_slow(tmp_path: Path, emulated: bool):
    slow = {"bytes_per_ns": 1.0, "num_steps": 1, "num_micro_batches": 1}
    waiting = judged(train(Plan(**slow), emulated)[0], tmp_path, "kineto")
    assert waiting.is_clean
    assert waiting.steps[0].stalled_ms > 10
    forgotten = judged(train(Plan(**slow, waits=False), emulated)[0], tmp_path, "kineto")
    assert {violation.rule for violation in forgotten.ordering.violations} == {"in_before_use"}
    assert len(forgotten.ordering.violations) == 6  # three layers, two sites


@pytest.mark.parametrize("kind", KINDS)
def test_the_summary_of_the_same_run_agrees_and_another_does_not(tmp_path: Path, kind: str):
    made, summary = train()
    assert not judged(made, tmp_path, "kineto", summary).mismatches
    summary["steps"][0]["num_out_copies"] += 1
    summary["steps"][1]["swapped_in_bytes"] -= 4
    mismatches = judged(made, tmp_path, "kineto", summary).mismatches
    assert mismatches == [
        "step 4: num_out_copies is 24 in the trace, 25 in the summary",
        f"step 5: swapped_in_bytes is {12 * (4 << 20)} in the trace, {12 * (4 << 20) - 4} in the summary",
    ]


def test_a_summary_without_the_traced_steps_or_the_counts_does_not_match(tmp_path: Path):
    made, summary = train(Plan(num_steps=1))
    old = {"steps": [{"iteration": 4, "swapped_out_bytes": 48 << 20, "swapped_in_bytes": 48 << 20}]}
    assert [text.split(": ")[1] for text in judged(made, tmp_path, "kineto", old).mismatches] == [
        "the summary has no num_out_copies", "the summary has no num_in_copies"
    ]  # fmt: skip
    summary["steps"][0]["iteration"] = 3
    (mismatch,) = judged(made, tmp_path, "kineto", summary).mismatches
    assert mismatch == "step 4 is not in the summary, which has steps 3-3: is it of another run?"


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_copy_on_a_copy_stream_without_a_range_is_an_error(tmp_path: Path, kind: str):
    made, summary = train()
    made.run("HtoD", 3 * MS, 4 * MS, 5 * MS, stream=IN, num_bytes=1 << 20)
    made.run("HtoD", 3 * MS, 4 * MS, 5 * MS, stream=IN, num_bytes=(1 << 20) - 1)  # small
    made.run("DtoH", 3 * MS, 4 * MS, 5 * MS, stream=33, num_bytes=1 << 30)  # somebody else's stream
    (mismatch,) = judged(made, tmp_path, kind, summary).mismatches
    assert "a HtoD copy of 1048576 bytes on copy stream 24" in mismatch


def test_a_copy_that_was_under_way_when_the_capture_began_is_no_error(tmp_path: Path):
    made, summary = train()
    made.run("DtoH", -3 * MS, -2 * MS, MS // 2, stream=OUT, num_bytes=1 << 20)
    made.launches.pop()
    assert judged(made, tmp_path, "kineto", summary).is_clean


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_direction_of_a_storage_are_checked(tmp_path: Path, kind: str):
    made, _ = train(Plan(num_steps=1))
    first, second = made.copies("DtoH")[0], made.copies("DtoH")[2]
    first.num_bytes -= 8
    second.what = "HtoD"
    assert judged(made, tmp_path, kind).mismatches == [
        "copy_out layers.0/mlp.linear_fc1/0 mb0: announced 4194304 bytes, its copies moved 4194296",
        "copy_out layers.0/self_attention.linear_qkv/0 mb0: copied HtoD",
    ]


def test_a_copy_belongs_to_the_range_of_its_own_thread(tmp_path: Path):
    made, _ = train(SMALL)
    number = made.copies("DtoH")[0].number
    made.launches = [
        (found, start, end, AUTOGRAD if found == number else thread) for found, start, end, thread in made.launches
    ]
    mismatches = judged(made, tmp_path, "kineto").mismatches
    assert any("belongs to no range" in text for text in mismatches)
    assert any("announced 4194304 bytes, its copies moved 0" in text for text in mismatches)


def test_a_copy_in_that_never_went_out_is_an_error(tmp_path: Path):
    made, _ = train(SMALL)
    start = 30 * US
    made.range("copy_in layers.9/mlp.linear_fc1/0 mb0 4194304", start, start + 3 * US, MAIN)
    made.run("HtoD", start + US, MS, 2 * MS, IN, MAIN, 4 << 20)
    assert judged(made, tmp_path, "kineto").mismatches == [
        "copy_in layers.9/mlp.linear_fc1/0 mb0 lies in no group's range",
        "step 4: copy_in layers.9/mlp.linear_fc1/0 mb0 without a copy out before",
    ]


def test_what_is_neither_released_nor_asked_for_stayed(tmp_path: Path):
    made, _ = train(SMALL)
    kept = "layers.1/mlp.linear_fc1/0"
    made.ranges = [
        found for found in made.ranges if kept not in found[0] or found[0].startswith("copy_out")
    ]  # fmt: skip
    gone = made.copies("HtoD")[0]
    made.device.remove(gone)
    analysis = judged(made, tmp_path, "kineto")
    assert analysis.is_clean
    assert findings(analysis)["reuse_not_judged"] == {"never_given_back": 1, "nothing_computed_after": 0}
    assert findings(analysis)["storages"] == {
        "num_copied_out": 2, "num_returned": 1, "num_overtaken": 0, "num_stayed": 1, "num_late": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("event", "said"), [("wait", "nothing waited for that copy"), ("release", "never released after its copy out")]
)
def test_a_wait_or_release_that_is_missing_is_an_error(tmp_path: Path, event: str, said: str):
    made, _ = train(SMALL)
    gone = f"{event} layers.1/mlp.linear_fc1/0 mb0"
    made.ranges = [found for found in made.ranges if found[0] != gone]
    (mismatch,) = judged(made, tmp_path, "kineto").mismatches
    assert mismatch.startswith("step 4: layers.1/mlp.linear_fc1/0 mb0 was copied in, but ")
    assert said in mismatch


def test_what_backward_asks_for_before_its_release_is_overtaken(tmp_path: Path):
    made, _ = train(SMALL)
    kept = "layers.1/mlp.linear_fc1/0"
    gone = (f"copy_in {kept}", f"release {kept}")
    made.ranges = [found for found in made.ranges if not found[0].startswith(gone)]
    made.device.remove(made.copies("HtoD")[0])
    found = findings(judged(made, tmp_path, "kineto"))
    assert (found["storages"]["num_overtaken"], found["storages"]["num_stayed"]) == (1, 0)
    assert found["reuse_not_judged"]["never_given_back"] == 0


def test_a_site_saved_twice_is_paired_in_order(tmp_path: Path):
    made, _ = train(SMALL)
    made.ranges = [(name.replace("layers.1/", "layers.0/"), *rest) for name, *rest in made.ranges]
    storages = judged(made, tmp_path, "kineto").storages
    outs = [storage.out.start_ns for storage in storages]
    assert outs == sorted(outs)
    assert len(storages) == 2
    assert all(storage.release and len(storage.reloads) == 1 and storage.reloads[0].wait for storage in storages)


def test_copies_on_the_compute_stream_are_an_error(tmp_path: Path):
    made, _ = train(SMALL)
    for copy in made.copies("DtoH"):
        copy.stream = 7
    assert judged(made, tmp_path, "kineto").mismatches == [
        "swap copies run on stream 7, which computes: nothing can overlap"
    ]
