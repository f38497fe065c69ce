"""The report's table of the cost of offloading optimizer state, from fabricated rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.flags import added, is_ours, swaps_optimizer
from benchmarks.report import optimizer
from benchmarks.rows import GIB, Row, write_rows
from tests.unit.benchmarks.made_report import LINK, RECOMPUTE, a_row, markdown_of, names

BOTH = {**LINK, "duplex_gb_s": 40.0}


def offloaded(part: str, step_ms: float, out_bytes: float, more: str = "", **fields: Any) -> Row:
    moved = {"optimizer_out_bytes": int(out_bytes), "optimizer_in_bytes": int(out_bytes / 2)}
    flags = f"{more} --swap-optimizer {part}".strip()
    return a_row(f"ours-{part}", step_ms, 20.0, flags, **{"link": BOTH, "is_ours": True, **moved, **fields})


def suite() -> list[Row]:
    """Return a suite: all of the state takes the link 200 ms, half of it 100 ms."""
    rows = [
        a_row("none", 700.0, 37.0, link=BOTH),
        offloaded("1", 900.0, 8e9, losses_equal=True),
        offloaded("0.5", 810.0, 4e9, losses_equal=True),
        offloaded("0.25", 750.0, 2e9, more="--swap-layers 0-1"),
        offloaded("0.125", 750.0, 1e9, more=RECOMPUTE),
        offloaded("auto", 750.0, 1e9, more="--swap-memory-gib 20"),
        offloaded("0.75", 900.0, 6e9, link=LINK),
        offloaded("0.875", 900.0, 6e9, optimizer_out_bytes=None),
        a_row("megatron-0.5", 1200.0, 20.0, "--optimizer-cpu-offload"),
    ]
    return [{**row, "suite": "h200-optimizer"} for row in rows]


def test_alone_beside_the_same_run_without() -> None:
    half, whole = optimizer.moved(suite())
    assert names([half.row, whole.row]) == ["ours-0.5", "ours-1"]
    assert (half.link_ms, whole.link_ms) == (100.0, 200.0)
    assert (half.more_ms, whole.more_ms) == (110.0, 200.0)
    assert optimizer.moved(suite()[1:]) == []


def test_the_table(tmp_path: Path) -> None:
    write_rows(tmp_path / "results" / "h200-optimizer.jsonl", suite())
    report = markdown_of(tmp_path).split("### Optimizer state\n")[1].split("\n### ")[0]
    lines = [line for line in report.splitlines() if line.startswith("| small")]
    gib = f"{4e9 / GIB:.2f}", f"{8e9 / GIB:.2f}"
    assert [line.strip("| ").split(" | ")[1:] for line in lines] == [
        ["**ours-0.5**", "810.0", "700.0", "110.0", gib[0], "40.0", "100.0", "1.100", "17.00", "10,114", "yes"],
        ["**ours-1**", "900.0", "700.0", "200.0", gib[1], "40.0", "200.0", "1.000", "17.00", "9,102", "yes"],
    ]


def test_state_alone_is_no_case_without_an_unswapped_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "results" / "h200-optimizer.jsonl", [row for row in suite() if row["method"] == "ours-1"])
    report = markdown_of(tmp_path)
    assert "the run without swapping is missing" not in report
    assert "*Not measured yet:*" in report.split("### Optimizer state\n")[1].split("\n### ")[0]


@pytest.mark.parametrize("part", ["1", "0.5", "auto"])
def test_a_part_and_what_the_planner_decides_are_ours(part: str) -> None:
    row = offloaded(part, 900.0, 8e9)
    assert swaps_optimizer(row)
    assert is_ours(row)


def test_flags_that_a_run_adds() -> None:
    none, whole, half = suite()[:3]
    assert added(none, [none]) == ""
    assert added(whole, [none]) == "--swap-optimizer 1"
    # Without an unswapped run: beside all others, a flag whose value differs included.
    assert [added(row, [whole, half]) for row in (whole, half)] == ["--swap-optimizer 1", "--swap-optimizer 0.5"]
