"""Two lines behind the last iteration."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.swap.common.counters import Totals
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, MIB
from megatron.swap.reporting.summary import CountedStep, RankReport, StepRecord
from megatron.swap.reporting.verdict import verdict_lines


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
        ({"layers": "none", "recompute": ("norm",)}, "--swap-layers none in place of the --swap- flags prints"),
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
        ({"memory_gib": 1.0}, "--swap-save-plan FILE writes the plan"),
    ],
)
def test_next_with_a_gpu(settings: dict[str, Any], line: str):
    assert lines(report(reserved_bytes=int(26.1 * GIB)), **settings)[1].startswith(f"next: {line}")
