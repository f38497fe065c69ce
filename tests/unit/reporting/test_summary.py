"""Output for users: tables, the step line, the JSON file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.swap.common.counters import Totals
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, MIB
from megatron.swap.reporting.summary import (
    CountedStep,
    RankReport,
    StepRecord,
    build_summary,
    device_line,
    layer_table,
    step_line,
    write_json,
)
from megatron.swap.reporting.verdict import verdict_lines


def step(iteration: int, layers: dict[int, tuple[int, int]], loss: float | None, wait_ms: float = 1.0) -> StepRecord:
    moved = Totals(layers, len(layers), num_late=1, num_out_copies=3, num_in_copies=2, wait_ms=wait_ms)
    return StepRecord(iteration, moved, loss, None if loss is None else 2.5)


def rank(steps: list[StepRecord], layers: list[int], **changes: object) -> RankReport:
    figures: dict = {
        "device": "cpu (emulation)",
        "device_peak_bytes": None,
        "saved_peak_bytes": 100,
        "host_booked_bytes": 50,
        "host_leased_peak_bytes": 40,
        "stayed_bytes": 7,
        **changes,
    }
    return RankReport(steps=steps, swapped_layers=layers, **figures)


def test_the_step_line_has_bytes_and_stall_and_the_peak_where_there_is_one():
    line = step_line(step(1, {0: (3 * MIB, 2 * MIB)}, None, wait_ms=4.25), None)
    assert "out 3.00 MiB" in line
    assert "in 2.00 MiB" in line
    assert "4.2 ms" in line
    assert "peak" not in line
    assert "device peak 412 MiB" in step_line(step(1, {}, None), 412 * MIB)


def test_the_device_line_has_what_is_held_and_says_what_leaves_fewer_fragments():
    whole = build_summary(1, [rank([], [], device_peak_bytes=100 * MIB, device_reserved_bytes=120 * MIB)])
    line = device_line(whole, expands=False)
    assert line is not None
    assert "at most 120 MiB, 100 MiB of it in use" in line
    assert "expandable_segments:True" in line
    assert "expandable" not in str(device_line(whole, expands=True))
    assert device_line(build_summary(1, [rank([], [])]), expands=False) is None


@pytest.mark.parametrize(("retries", "expected"), [([0, 3, 1, 0], None), ([5, 0, 1, 2], "in 3 steps it was full")])
def test_a_device_that_is_full_in_many_steps_is_reported(retries: list[int], expected: str | None):
    steps = [replace(step(i, {}, None), num_alloc_retries=count) for i, count in enumerate(retries)]
    full = build_summary(1, [rank(steps, [], device_peak_bytes=100 * MIB, device_reserved_bytes=101 * MIB)])
    assert full["num_alloc_retries"] == sum(retries)
    line = str(device_line(full, expands=True))
    assert ("was full" in line) is (expected is not None)
    assert (expected or "") in line


class TestBuildSummary:
    def test_bytes_add_up_over_ranks_and_peaks_are_the_worst(self):
        first = rank([step(1, {0: (9, 9)}, None), step(2, {0: (10, 8)}, None, 5.0)], [0], saved_peak_bytes=300)
        second = rank([step(1, {1: (1, 1)}, 3.5), step(2, {1: (20, 15)}, 3.25, 2.0)], [1], device_peak_bytes=77)
        summary = build_summary(3, [first, second])
        assert summary["num_layers"] == 3
        assert summary["num_ranks"] == 2
        assert summary["swapped_layers"] == [0, 1]
        assert (summary["swapped_out_bytes"], summary["swapped_in_bytes"], summary["num_groups"]) == (30, 23, 2)
        assert summary["wait_ms"] == 5.0
        assert (summary["saved_peak_bytes"], summary["device_peak_bytes"]) == (300, 77)
        assert (summary["host_booked_bytes"], summary["host_leased_peak_bytes"]) == (100, 80)
        assert (summary["num_late"], summary["stayed_bytes"]) == (2, 14)
        assert [entry["swapped_out_bytes"] for entry in summary["layers"]] == [10, 20, 0]
        assert [entry["iteration"] for entry in summary["steps"]] == [1, 2]

    def test_it_is_json(self, tmp_path: Path):
        summary = build_summary(2, [rank([step(0, {0: (1, 1)}, 1.0)], [0])])
        target = tmp_path / "new" / "folder" / "summary.json"
        for _ in range(2):  # the second replaces the first
            write_json(str(target), summary)
            assert json.loads(target.read_text()) == json.loads(json.dumps(summary))
        assert [path.name for path in target.parent.iterdir()] == ["summary.json"]


def test_the_table_at_the_end_joins_layers_with_equal_figures():
    figures = [(MIB, MIB), (MIB, MIB), (0, 0), (MIB, MIB)]
    layers = [
        {"layer": layer, "swapped_out_bytes": out, "swapped_in_bytes": back}
        for layer, (out, back) in enumerate(figures)
    ]
    text = layer_table({"layers": layers})
    rows = [line.split() for line in text.splitlines()[2:]]
    assert [row[0] for row in rows] == ["0-1", "2", "3"]
    assert rows[0][-2:] == ["2.00", "MiB"]
    assert len({len(line) for line in text.splitlines()}) == 1, "columns line up"


def report(saved_mib: int | None = 200, wait_ms: float = 1.25, reserved_bytes: int | None = None) -> RankReport:
    counted = None if saved_mib is None else CountedStep(3, 30 * MIB, saved_mib * MIB)
    step = StepRecord(9, Totals({}, wait_ms=wait_ms), 1.0, None)
    return RankReport([step], "cpu", None, None, 0, 0, 0, device_reserved_bytes=reserved_bytes, counted=counted)


def lines(*reports: RankReport, **settings: Any) -> list[str]:
    layers = "none" if "memory_gib" in settings else "0-23"
    return verdict_lines(Settings(**{"layers": layers, **settings}), reports or [report()])


def test_what_swapping_did():
    assert lines()[0] == (
        "autograd held at most 30 MiB; without swapping it would hold 200 MiB (bytes saved in step 3, counted); "
        "compute waited 1.2 ms for copies in the last step"
    )
    assert "without swapping and recomputation it would hold" in lines(recompute=("norm",))[0]


def test_of_several_ranks_the_one_that_saves_most():
    first = lines(report(100, wait_ms=9.0), report(300), report(None))[0]
    assert "it would hold 300 MiB (bytes saved in step 3 (rank 1), counted); compute waited 9.0 ms" in first


def test_a_run_that_ended_before_its_plan():
    assert lines(report(None))[0] == "the run ended before a step under its plan was counted"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "--swap-layers none in place of --swap-layers 0-23 prints the same losses"),
        ({"memory_gib": 1.0}, "--swap-layers none in place of --swap-memory-gib prints"),
    ],
)
def test_next_on_a_machine_without_a_gpu(settings: dict[str, Any], words: str):
    verdict = lines(**settings)
    assert len(verdict) == 2
    assert verdict[1].startswith("next: the same command with ")
    assert words in verdict[1]
    assert "cli.main plan" in verdict[1]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({}, "--swap-memory-gib 27 in place of --swap-layers 0-23: the fastest plan within the memory of this run"),
        ({"memory_gib": 1.0, "save_plan": "p.json"}, "--swap-plan p.json in place of --swap-memory-gib "),
    ],
)
def test_next_with_a_gpu(settings: dict[str, Any], line: str):
    assert lines(report(reserved_bytes=int(26.1 * GIB)), **settings)[1].startswith(f"next: {line}")
