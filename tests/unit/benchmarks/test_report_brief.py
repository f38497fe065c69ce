"""The page for people: names of models and methods, the rows that count, and where other methods win."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from benchmarks import names
from benchmarks.report.brief import Brief, planned_shown
from benchmarks.report.build import BRIEF
from benchmarks.report.page import joined, to_html
from benchmarks.report.results import Results, read_results
from benchmarks.report.selection import current
from benchmarks.rows import RowError, check_row
from benchmarks.suites.picture import MARKER_PIXELS, _place, _shown, draw
from tests.unit.benchmarks.made_report import RECOMPUTE, RESULTS, ROOT, a_row, markdown_of, ours, suite


@pytest.mark.parametrize(
    ("count", "more", "text"),
    [
        (3_500_281_856, "", "3.5B, 2k tokens"),
        (8_030_261_248, "--seq-length 131072", "8B, 128k tokens"),
        (133_539_840, "--seq-length 100", "134M, 100 tokens"),
        (2_695_008_256, "--num-experts 8", "2.7B MoE, 2k tokens"),
        (None, "", "2k tokens"),
        (10**9, "--fp8-format hybrid --fp8-recipe tensorwise", "1B, 2k tokens, FP8 tensorwise"),
        (10**9, "--fp8-format hybrid", "1B, 2k tokens, FP8 delayed"),
    ],
)
def test_a_model_is_named_by_size_and_sequence(count: int | None, more: str, text: str) -> None:
    assert names.model(a_row("none", 1.0, 1.0, more, num_params=count)) == text


def test_changing_lengths_are_in_the_name() -> None:
    row = a_row("none", 1.0, 1.0, num_params=10**9, sequence_schedule=[[50, 4096], [50, 2048], [50, 4096]])
    assert names.model(row) == "1B, 2k and 4k tokens"


@pytest.mark.parametrize(
    ("method", "more", "text"),
    [
        ("none", "", "no offload"),
        ("recompute-layernorm-mlp", "", "recompute layer norm, MLP"),
        ("offload-qkv-core-attn-recompute-layernorm", "", "offload QKV, core attention + recompute layer norm"),
        ("megatron-0.5", "", "Megatron optimizer offload 50%"),
        (
            "megatron-optimizer-0.55-unpinned-full-recompute", "",
            "Megatron optimizer offload 55%, unpinned + full recompute",
        ),
        ("unfused", "", "unfused gradients"),
        ("x-unfused", "--swap-optimizer auto", "optimizer state auto + unfused gradients"),
        ("something else", "", "something else"),
        ("x", "--swap-layers 0-3 --swap-recompute norm activation", "layers 0-3 + recompute norm, activation"),
        ("x", f"--swap-layers all {RECOMPUTE}", "all layers + recompute MLP"),
        ("x", "--swap-layers all --swap-modules self_attention", "attention of all layers"),
        ("x", "--swap-optimizer 0.69 --swap-disk-dir /d", "69% of optimizer state, disk"),
        ("x", "--swap-layers none --swap-oom-guard", "out-of-memory guard"),
        ("x", "--swap-loss-chunks auto --mlp-chunks-for-training 4", "loss chunks: auto + MLP chunks: 4"),
    ],
)  # fmt: skip
def test_a_method_is_named_by_what_it_does(method: str, more: str, text: str) -> None:
    assert names.method(a_row(method, 1.0, 1.0, more, is_ours="--swap" in more)) == text


def test_a_planned_run_is_named_by_its_budget() -> None:
    row = a_row("x", 1.0, 1.0, "--swap-memory-gib 75.773755 --swap-optimizer auto", is_ours=True, budget_gib=75.773755)
    assert names.method(row) == "auto, 75.8 GiB + optimizer state auto"
    assert names.method(a_row("x", 1.0, 1.0, "--swap-plan p.json", is_ours=True, budget_gib=134.0)) == (
        "plan file, 134 GiB"
    )


def test_every_committed_method_has_a_name() -> None:
    results = read_results(RESULTS)
    for _, rows in results.files:
        for row in rows:
            if "is_ours" in row and row["outcome"] == "ok":
                assert names.method(row) != row["method"] or row["suite"].startswith("prove-"), row["method"]


# ------------------------------------------------------------------------------------------- rows that count


def test_of_repeated_runs_the_last_one_counts() -> None:
    first, second = a_row("none", 1.0, 1.0), a_row("none", 2.0, 1.0)
    other_budget = {**a_row("none", 3.0, 1.0), "budget_gib": 9.0}
    pruned = {**a_row("none", None, None), "outcome": "pruned"}
    assert current([first, other_budget, second, pruned]) == [other_budget, second]
    assert current([pruned, first]) == [first]
    verified = [{**first, "suite": "prove-equality"}] * 2
    assert current(verified) == verified


def test_results_are_read_by_this_rule() -> None:
    again = a_row("none", 690.0, 40.0)
    results = Results(Path(), [("h200-dense.jsonl", [*suite(), again])], [], [])
    assert [row for row in results.suites["h200-dense"] if row["method"] == "none"] == [again]


@pytest.mark.parametrize(("date", "is_good"), [("2026-11-24T08:00:00+00:00", True), ("yesterday", False), (7, False)])
def test_a_date_is_a_time(date: object, is_good: bool) -> None:
    row = {**a_row("none", 1.0, 1.0), "date": date}
    if is_good:
        check_row(row)
        return
    with pytest.raises(RowError, match="a time in ISO 8601 is expected"):
        check_row(row)


# ------------------------------------------------------------------------------------------- where others win


def brief_of(rows: list[dict[str, Any]]) -> Brief:
    return Brief(Results(Path(), [("h200-dense.jsonl", rows)], [], []))


def test_points_that_lose_and_methods_that_win_are_shown() -> None:
    found = brief_of(suite())
    assert found.tally == {"points": 3, "ours": 2, "baseline": 1, "neither": 0, "alone": 0}
    assert found.worst == {
        "model": "1B, 2k tokens", "ours": "all layers", "other": "full recompute", "ratio": "1.33"
    }  # fmt: skip
    assert found.better is not None
    assert found.better.rows == [["1B, 2k tokens", "24.0", "recompute MLP", "**all layers + recompute MLP**", "1.07"]]
    assert found.below == ["1B, 2k tokens: full recompute 15.0; ours 18.0 GiB"]


def test_a_table_of_runs_under_a_budget_keeps_the_best_other_methods() -> None:
    planned = ours("auto", 720.0, 28.0, 6.0, "--swap-memory-gib 30", is_ours=True, budget_gib=30.0)
    fixed = ours("planned", 720.0, 28.0, 6.0, "--swap-plan p.json", is_ours=True, budget_gib=30.0)
    offload = a_row("offload-attention-recompute-mlp", 950.0, 26.0, "--fine-grained-activation-offloading")
    shown = [row["method"] for row in planned_shown([*suite(), offload, planned, fixed])]
    assert shown == ["none", "recompute-mlp", "full-recompute", "offload-attention-recompute-mlp", "auto"]


@pytest.mark.slow
def test_only_runs_with_an_unswapped_reference_count_as_equal() -> None:
    page = markdown_of(ROOT / "docs", BRIEF)
    assert "| one GPU | 39 | 39 |" in page, "the guarded run's reference is a guarded one"
    assert re.search(r"no offload \| out of device memory", page)


# ------------------------------------------------------------------------------------------- the HTML report


def test_the_html_report_has_a_table_of_contents(tmp_path: Path) -> None:
    brief = "# One\n\n[a](benchmarks/appendix.md#two) [b](dev/x.md) [c](benchmarks/appendix.md)\n"
    page = to_html(joined(brief, "# The rest\n\n## Two\n\n[d](../benchmarks.md)\n"), tmp_path)
    assert 'href="#two"' in page.split("</nav>")[0]
    assert '<a href="#two">a</a> <a href="../dev/x.md">b</a> <a href="#the-rest">c</a>' in page
    assert '<a href="#one">d</a>' in page


# ------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("case", ["L16-h4096", "L4-h8192"])
def test_no_label_hides_a_point_or_a_label(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in read_results(RESULTS).suites["h200-planner"] if row["case"] == case]
    monkeypatch.setattr(plt, "close", lambda figure: None)
    draw(rows, tmp_path / "x.png")
    figure = plt.gcf()
    (panel,) = figure.axes
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [text.get_window_extent(renderer) for text in panel.texts if text.get_text()]
    points = [panel.transData.transform(_place(row)) for row in _shown(rows)]
    for box in boxes:
        for x, y in points:
            inside = box.x0 - 1 < x < box.x1 + 1 and box.y0 - MARKER_PIXELS / 2 < y < box.y1 + MARKER_PIXELS / 2
            assert not inside
    assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])
    legend = figure.legends[0].get_window_extent(renderer)
    assert not legend.overlaps(panel.get_window_extent(renderer)), "the legend is outside"
    plt.close("all")
