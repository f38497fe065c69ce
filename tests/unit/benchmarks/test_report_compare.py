"""The comparison of methods by time and memory, and the report's words about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report import compare
from benchmarks.report.compare import Faster
from benchmarks.rows import GIB, Row, write_rows
from benchmarks.suites import losses
from tests.unit.benchmarks.made_report import (
    RECOMPUTE,
    a_row,
    markdown_of,
    names,
    ours,
    suite,
)


def test_the_frontier() -> None:
    assert names(compare.on_frontier(suite())) == ["full-recompute", "ours-mlp", "recompute-mlp", "ours-0-1", "none"]


def test_by_peak_failures_come_last() -> None:
    rows = compare.by_peak(suite())
    assert names(rows)[:3] == ["full-recompute", "ours-mlp", "ours-all"]
    assert names(rows)[3:5] == ["recompute-mlp", "slow"]  # one peak: the faster one first
    assert names(rows)[-3:] == ["dies", "cannot", "ours-dies"]


def test_the_best_peer_of_each_point() -> None:
    found = [(d.ours["method"], d.baseline and d.baseline["method"], d.faster) for d in compare.duels(suite())]
    assert found == [
        ("ours-mlp", "full-recompute", Faster.OURS),
        ("ours-all", "full-recompute", Faster.BASELINE),
        ("ours-0-1", "recompute-mlp", Faster.OURS),
    ]
    assert compare.duels(suite())[0].ratio == pytest.approx(900 / 860)


@pytest.mark.parametrize(("baseline_peak", "is_within"), [(24.0, True), (24.004, True), (24.006, False), (25.0, False)])
def test_same_peak_means_the_same_when_printed(baseline_peak: float, is_within: bool) -> None:
    rows = [a_row("baseline", 500.0, baseline_peak, RECOMPUTE), ours("mine", 400.0, 24.0, 1.0, "--swap-layers all")]
    assert (compare.duels(rows)[0].baseline is not None) == is_within


def test_of_equally_fast_peers_the_smaller_counts_then_the_first_name() -> None:
    mine = ours("mine", 400.0, 30.0, 1.0, "--swap-layers all")
    baselines = [a_row("c", 500.0, 25.0), a_row("b", 500.0, 24.0), a_row("a", 500.0, 25.0)]
    best = compare.fastest_within([mine, *baselines][1:], 30.0)
    assert best is not None
    assert best["method"] == "b"
    best = compare.fastest_within([baselines[0], baselines[2]], 30.0)
    assert best is not None
    assert best["method"] == "a"


def test_steps_that_overlap_are_not_called_faster() -> None:
    one = a_row("one", 500.0, 20.0)
    assert compare.faster(one, a_row("nearly", 504.9, 20.0)) is Faster.NEITHER  # apart, but by less than noise
    assert compare.faster(one, a_row("slower", 506.0, 20.0)) is Faster.OURS
    assert compare.faster(one, a_row("faster", 494.0, 20.0)) is Faster.BASELINE
    assert compare.faster(one, a_row("wide", 506.0, 20.0, step_ms_all=[490.0, 506.0, 508.0])) is Faster.NEITHER
    one["step_ms_all"] = [400.0, 500.0, 900.0]  # one slow step does not hide a difference of the middle half
    assert compare.middle_half(one) == (450.0, 700.0)
    lone = {**one, "step_ms_all": [500.0]}
    assert compare.middle_half(lone) == (500.0, 500.0)


def test_runs_without_a_peak_or_a_result_are_compared_with_nothing() -> None:
    rows = [a_row("cpu", 10.0, None), a_row("dies", None, None), ours("mine", 9.0, None, 1.0, "--swap-layers all")]
    assert compare.duels(rows) == compare.losses(rows) == compare.on_frontier(rows) == []
    assert names(compare.by_peak(rows)) == ["cpu", "mine", "dies"]


def test_where_a_peer_is_better() -> None:
    rows_by_name = {row["method"]: row for row in suite()}
    found = compare.losses(suite())
    assert [(loss.baseline["method"], loss.ours) for loss in found] == [
        ("full-recompute", None), ("recompute-mlp", rows_by_name["ours-mlp"]),
    ]  # fmt: skip
    assert found[0].lowest is not None
    assert found[0].lowest["method"] == "ours-mlp"
    rows = [row for row in suite() if row["method"] != "ours-mlp"]
    worse = compare.losses(rows)[1]
    assert (worse.baseline["method"], worse.ours and worse.ours["method"]) == ("recompute-mlp", "ours-all")
    assert worse.ratio == pytest.approx(1.5)
    assert worse.rung is not None
    assert worse.rung.is_link_bound


def test_reasons_follow_the_data(made: Path) -> None:
    def sentences(rows: list[Row]) -> str:
        write_rows(made / "results" / "h200-dense.jsonl", rows)
        return re.sub(r"\s+", " ", markdown_of(made))

    rows = [row for row in suite() if row["method"] != "ours-mlp"]
    bound = sentences(rows)
    assert (
        "At 24.00 GiB `recompute-mlp` (800.0 ms) is 1.50× faster than our fastest point at or below that peak, "
        "`ours-all` (1200.0 ms). Ours is bound by the link here: per micro-batch, copies out take 386.5 ms at the "
        "link's full speed and 100.0 ms of forward can hide them; copies in take 386.5 ms under 200.0 ms of backward. "
        "Recomputation costs less than the exposed copies." in bound
    )
    free = [{**row, **({"swapped_out_bytes": GIB, "swapped_in_bytes": GIB} if row["is_ours"] else {})} for row in rows]
    assert "By the arithmetic all of our copies are hidden here" in sentences(free)
    assert "bound by the link" not in sentences(free)
    untimed = [{**row, "forward_ms": None} for row in rows]
    assert "The rows do not say why" in sentences(untimed)
    assert "that alone (`recompute-mlp`) takes 800.0 ms, and swapping costs the rest" not in sentences(rows)
    mixed = sentences(suite())
    assert "`ours-mlp` (860.0 ms). Ours recomputes too, and that recomputation alone (`recompute-mlp`)" in mixed
    assert "the lowest, `ours-mlp`, needs 18.00 GiB" in sentences(suite())
    won = [row for row in suite() if row["method"] in ("recompute-mlp", "ours-mlp")]
    won[1]["device_peak_gib"], won[1]["step_ms_median"], won[1]["step_ms_all"] = 20.0, 700.0, [700.0]
    assert "No measured baseline is clearly faster" in sentences(won)


def test_a_peer_with_other_losses_is_no_peer(made: Path) -> None:
    rows = suite()
    rows[2].update(losses_equal=False, loss_max_rel_diff=0.5)
    assert names(compare.on_frontier(rows)) == ["ours-mlp", "recompute-mlp", "ours-0-1", "none"]
    assert compare.duels(rows)[0].baseline is None
    assert "full-recompute" not in [loss.baseline["method"] for loss in compare.losses(rows)]
    write_rows(made / "results" / "h200-dense.jsonl", rows)
    report = markdown_of(made)
    assert "**other losses: 5.0e-01**" in report
    assert "differ from the reference** by 50.0 %" in report
    assert "| **ours-mlp** | 18.00 | 860.0 | no baseline fits | – | – | – |" in report


def test_few_rows_tell_no_noise() -> None:
    row = a_row("x", 1.0, 1.0, losses_equal=False, loss_max_rel_diff=0.01)
    assert not losses.is_beyond_noise(row, None)
    assert losses.is_beyond_noise({**row, "loss_max_rel_diff": 0.1}, None)
    again = a_row("none-again", 1.0, 1.0, losses_equal=False, loss_max_rel_diff=1e-4)
    assert losses.loss_noise([a_row("none", 1.0, 1.0), again, row]) == 1e-4


def test_nearly_the_same_reserved_memory_is_the_same() -> None:
    mine = ours("mine", 400.0, 24.0, 1.0, "--swap-layers all")
    for reserved_gib, fits in ((24.2, True), (24.21, False)):
        rows = [mine, a_row("baseline", 500.0, 30.0, device_reserved_gib=reserved_gib)]
        assert (compare.duels(rows, compare.RESERVED)[0].baseline is not None) == fits
        assert compare.duels(rows)[0].baseline is None


def test_what_was_not_measured_is_listed(made: Path) -> None:
    def report(rows: list[Row]) -> str:
        write_rows(made / "results" / "h200-dense.jsonl", rows)
        return markdown_of(made)

    assert "Cases of the suite that were not measured: L16-h4096 and L4-h8192." in report(suite())
    known = report([{**row, "case": "L16-h4096"} for row in suite()])
    assert "Cases of the suite that were not measured: L4-h8192." in known
    (line,) = [line for line in known.splitlines() if line.startswith("In the suite, not measured here:")]
    assert "recompute-layernorm-mlp" in line
    assert "full-recompute" not in line.split()


def test_what_is_said_of_noise_follows_the_data(made: Path) -> None:
    def report(rows: list[Row]) -> str:
        write_rows(made / "results" / "h200-dense.jsonl", rows)
        return re.sub(r"\s+", " ", markdown_of(made))

    once = [{**row, "step_ms_rounds": [row["step_ms_median"]] if row["step_ms_median"] else None} for row in suite()]
    assert "Each method ran once, so the noise of step times is unknown." in report(once)
    assert "take turns" not in report(once)
    again = {**once[0], "method": "none-again", "step_ms_rounds": [714.0], "loss_max_rel_diff": 1e-5}
    said = report([*once, again])
    assert "Each method ran once, except for the repeat of `none`. The median step differs by up to 2.0 %" in said
    assert "(none). Losses: the noise is the difference between repeated runs of the reference." in said
    twice = [{**once[0], "num_rounds": 2, "step_ms_rounds": [700.0, 707.0]}, *once[1:]]
    assert "the methods take turns" in report(twice)
    assert "The median step differs by up to 1.0 % between runs of one method (none)." in report(twice)


def test_what_arithmetic_does_not_explain_is_said(made: Path) -> None:
    rows = suite()
    rows[6].update(step_ms_median=721.0, step_ms_all=[721.0])
    write_rows(made / "results" / "h200-dense.jsonl", rows)
    report = re.sub(r"\s+", " ", markdown_of(made))
    assert "every copy of **ours-0-1** is hidden, but the step takes 1.030 × the unswapped one; the rows do" in report
    rows[6]["num_late"] = 3
    write_rows(made / "results" / "h200-dense.jsonl", rows)
    assert "3 storages were reloaded late" in markdown_of(made)
