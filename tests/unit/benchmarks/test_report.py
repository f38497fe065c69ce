"""The report matches the results; fabricated results show that the check notices differences."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flags import is_ours
from benchmarks.pictures import digest_of
from benchmarks.report import compare, guard, planner, tables
from benchmarks.report.brief import Brief
from benchmarks.report.build import APPENDIX, BRIEF, HERE, build, check
from benchmarks.report.compare import Faster
from benchmarks.report.profiles import read_profiles
from benchmarks.report.results import Results, current, read_results
from benchmarks.rows import GIB, Row, write_rows
from benchmarks.suites.ranking import by_peak, fastest_within, on_frontier
from benchmarks.traces.analysis import analyse
from benchmarks.traces.reader import read_trace
from benchmarks.traces.report import save
from tests.unit.benchmarks.made_report import RECOMPUTE, RESULTS, ROOT, a_row, markdown_of, ours, suite
from tests.unit.benchmarks.made_report import names as methods_of
from tests.unit.benchmarks.made_traces import Plan, train

TRACED = "h200-profile-1.3b-torch/findings.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder ``docs`` with results for every section of the report, and the report."""
    folder = tmp_path_factory.mktemp("whole")
    results = folder / "docs" / "results"
    write_rows(results / "h200-dense.jsonl", suite())
    for name in ("h200-equality", "h200-two-gpus"):
        shutil.copy(RESULTS / f"{name}.jsonl", results)
    shutil.copy(RESULTS / "literature.toml", results)
    trace, summary = train(Plan(num_steps=2))
    for profiler, kind in (("torch", "kineto"), ("nsys", "nsys")):
        save(analyse(read_trace(trace.write(folder, kind)), summary), results / f"h200-profile-1.3b-{profiler}", None)
    build(results, results.parent)
    return results.parent


@pytest.fixture
def built(whole: Path, tmp_path: Path) -> Path:
    """A copy of the folder that the test may change."""
    return shutil.copytree(whole, tmp_path / "docs")


@pytest.fixture
def proved() -> list[Row]:
    """The rows of runs that were compared to the bit on one GPU."""
    return read_results(RESULTS).suites["prove-equality"]


# ------------------------------------------------------------------------------------------- what is committed


def test_the_committed_report_says_what_the_results_say() -> None:
    command = [sys.executable, "tools/report.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_result_file_is_in_the_index() -> None:
    """And the index names no file that is not there; folders of traces are indexed by pattern."""
    index = (ROOT / "docs" / "dev" / "results.md").read_text()
    files = {"h200-profile-*" if "-profile-" in path.name else path.name for path in RESULTS.iterdir()}
    assert sorted(files) == sorted(re.findall(r"^\| `([^`]+)` \|", index, flags=re.MULTILINE))


def test_the_page_for_people_is_short() -> None:
    words = (ROOT / "docs" / "benchmarks.md").read_text().split()
    assert sum(any(letter.isalnum() for letter in word) for word in words) <= 1100


FIGURE = re.compile(r"\d|%|\b(?:twice|half as|double|percent|per cent)\b")


def figures_by_hand(template: str) -> list[str]:
    """Return the lines with a digit, a percentage or a ratio in words, in expressions too. ``{% %}`` are marks."""
    lines = template.splitlines()
    return [line for line in lines if FIGURE.search(re.sub(r"\{%|%\}", "", line))]


def test_no_figure_is_typed_into_a_template() -> None:
    for page in (BRIEF, APPENDIX):
        assert figures_by_hand((HERE / f"{page}.j2").read_text()) == []
    for planted in ("It is 1.12x faster.", "costs {{ 3.5 }} ms", "some % slower", "twice as fast"):
        assert figures_by_hand(f"Fine.\n{planted}\n{{% if x %}}fine{{% endif %}}") == [planted]


# ------------------------------------------------------------------------------------------- building and checking


def test_what_is_built_agrees_and_is_read_only_from_results(built: Path) -> None:
    pages = {"benchmarks.md", "benchmarks/appendix.md"}
    for page in pages:
        (built / page).unlink()
    assert check(built / "results", built) == [f"{built / page} is missing" for page in sorted(pages)]
    written = {path.relative_to(built).as_posix() for path in build(built / "results", built)}
    assert written == pages | {"benchmarks/h200-dense-small.png"}
    assert check(built / "results", built) == []


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("h200-dense.jsonl", '"step_ms_median": 860.0', '"step_ms_median": 861.0', "861.0"),
        ("h200-equality.jsonl", '"weights_sha256_equal": true', '"weights_sha256_equal": false', None),
        ("h200-profile-1.3b-nsys/findings.json", '"num_copied_out": ', '"num_copied_out": 9', "9"),
        ("literature.toml", "vDNN", "wDNN", "wDNN"),
    ],
)
def test_a_changed_figure_is_noticed(built: Path, file: str, old: str, new: str, said: str | None) -> None:
    path = built / "results" / file
    if said is None:  # the first is the reference of its case, which is compared with nothing
        change(path, old, "\0")
        change(path, old, new)
        change(path, "\0", old)
    else:
        change(path, old, new)
    differences = check(built / "results", built)
    assert any(line.startswith("+") and (said or "differ") in line for line in differences), differences


def test_a_stale_picture_is_noticed_and_renewed(built: Path) -> None:
    change(built / "results" / "h200-dense.jsonl", '"step_ms_min": 859.0', '"step_ms_min": 858.0')
    picture = built / "benchmarks" / "h200-dense-small.png"
    assert f"{picture} is missing or shows other figures" in check(built / "results", built)
    build(built / "results", built)
    assert check(built / "results", built) == []
    time = picture.stat().st_mtime_ns
    build(built / "results", built)
    assert picture.stat().st_mtime_ns == time, "a picture that shows its data is left"
    picture.write_bytes(picture.read_bytes()[:-100])
    assert digest_of(picture) is None, "half a picture"
    assert digest_of(built / "benchmarks.md") is None


def report(folder: Path, output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/report.py", "--results", str(folder), "--output", str(output), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_line_says_what_is_wrong(built: Path, tmp_path: Path) -> None:
    change(built / "benchmarks" / "appendix.md", "860.0", "860.1")
    assert report(built / "results", built, "--check").returncode == 1
    change(built / "results" / "h200-dense.jsonl", '"commit": "0123456789", ', "")
    for folder, said in ((built / "results", "field 'commit' is missing"), (tmp_path / "nowhere", "is no folder")):
        done = report(folder, built)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


def test_which_rows_are_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for page in (BRIEF, APPENDIX):
        assert "| ---" not in markdown_of(tmp_path, page)
    write_rows(tmp_path / "results" / "h200-dense-again.jsonl", [{**row, "case": "long ago"} for row in suite()])
    assert "long ago" not in markdown_of(tmp_path), "repeated on another day"
    first, second = a_row("none", 1.0, 1.0), a_row("none", 2.0, 1.0)
    other_budget = {**a_row("none", 3.0, 1.0), "budget_gib": 9.0}
    pruned = {**a_row("none", None, None), "outcome": "pruned"}
    assert current([first, other_budget, second, pruned]) == [other_budget, second], "the last one counts"
    assert current([pruned, first]) == [first]
    left, *rows = suite()
    files = [("h200-dense.jsonl", rows), ("more.jsonl", [left, {**left, "suite": "h200-guard"}])]
    assert {name: len(found) for name, found in Results(Path(), files, [], []).suites.items()} == {
        "h200-dense": len(rows), "h200-dense, more.jsonl": 1, "h200-guard, more.jsonl": 1
    }  # fmt: skip


# ------------------------------------------------------------------------------------------- comparison


def test_points_and_their_best_peers() -> None:
    assert methods_of(on_frontier(suite())) == ["full-recompute", "ours-mlp", "recompute-mlp", "ours-0-1", "none"]
    assert methods_of(by_peak(suite()))[2:5] == ["ours-all", "recompute-mlp", "slow"], "one peak: the faster one first"
    assert methods_of(by_peak(suite()))[-3:] == ["dies", "cannot", "ours-dies"]
    duels = compare.duels(suite())
    assert [(duel.ours["method"], duel.baseline and duel.baseline["method"], duel.faster) for duel in duels] == [
        ("ours-mlp", "full-recompute", Faster.OURS),
        ("ours-all", "full-recompute", Faster.BASELINE),
        ("ours-0-1", "recompute-mlp", Faster.OURS),
    ]
    assert duels[0].ratio == pytest.approx(900 / 860)
    told = [(loss.baseline["method"], loss.ours and loss.ours["method"]) for loss in compare.losses(suite())]
    assert told == [("full-recompute", None), ("recompute-mlp", "ours-mlp")]
    for gib, is_within in ((24.0, True), (24.004, True), (24.006, False)):  # 24.00 when printed
        rows = [a_row("baseline", 500.0, gib, RECOMPUTE), ours("mine", 400.0, 24.0, 1.0, "--swap-layers all")]
        assert (compare.duels(rows)[0].baseline is not None) == is_within
    baselines = [a_row("c", 500.0, 25.0), a_row("b", 500.0, 24.0), a_row("a", 500.0, 25.0)]
    assert [(fastest_within(rows, 30.0) or {})["method"] for rows in (baselines, baselines[::2])] == ["b", "a"]


def test_steps_that_overlap_are_not_called_faster() -> None:
    one = a_row("one", 500.0, 20.0)
    for step_ms, times, found in (
        (504.9, None, Faster.NEITHER),  # apart, but by less than noise
        (506.0, None, Faster.OURS), (494.0, None, Faster.BASELINE), (506.0, [490.0, 506.0, 508.0], Faster.NEITHER),
    ):  # fmt: skip
        other = a_row("other", step_ms, 20.0)
        assert compare.faster(one, {**other, "step_ms_all": times or other["step_ms_all"]}) is found
    assert compare.middle_half({**one, "step_ms_all": [400.0, 500.0, 900.0]}) == (450.0, 700.0)
    assert compare.middle_half({**one, "step_ms_all": [500.0]}) == (500.0, 500.0)


def test_a_peer_with_other_losses_is_no_peer(built: Path) -> None:
    rows = suite()
    rows[2].update(losses_equal=False, loss_max_rel_diff=0.5)
    assert methods_of(on_frontier(rows)) == ["ours-mlp", "recompute-mlp", "ours-0-1", "none"]
    assert compare.duels(rows)[0].baseline is None
    assert "full-recompute" not in [loss.baseline["method"] for loss in compare.losses(rows)]
    write_rows(built / "results" / "h200-dense.jsonl", rows)
    report = re.sub(r"\s+", " ", markdown_of(built))
    assert "**other losses: 5.0e-01**" in report
    assert "differ from the reference** by 50.0 %" in report


# ------------------------------------------------------------------------------------------- the page for people


def test_points_that_lose_and_methods_that_win_are_shown() -> None:
    found = Brief(Results(Path(), [("h200-dense.jsonl", suite())], [], []))
    assert found.tally == {"points": 3, "ours": 2, "baseline": 1, "neither": 0, "alone": 0}
    assert found.worst == {"model": "1B, 2k tokens", "ours": "all layers", "other": "full recompute", "ratio": "1.33"}
    assert found.better is not None
    assert found.better.rows == [["1B, 2k tokens", "24.0", "recompute MLP", "**all layers + recompute MLP**", "1.07"]]
    assert found.below == ["1B, 2k tokens: full recompute 15.0; ours 18.0 GiB"]
    alone = [row for row in suite() if row["method"] == "none" or is_ours(row)]
    assert Brief(Results(Path(), [("h200-dense.jsonl", alone)], [], [])).tally is None, "nothing is beside ours"


# ------------------------------------------------------------------------------------------- equality and the guard


def test_the_first_run_of_a_case_in_a_command_is_its_reference(proved: list[Row]) -> None:
    runs = tables.equal_runs(proved)[:6]
    assert [run.is_reference for run in runs] == [True, False, False] * 2
    assert [run.is_ours for run in runs] == [False, False, True] * 2
    assert all(run.is_equal for run in runs)
    broken = tables.EqualRun({**runs[2].row, "grad_norms_equal": False}, False, True)
    assert not broken.is_equal
    assert "**differ**" in str(tables.equality_table([broken]))
    again = [{**row, "command": "another", "flags": f"{row['flags']} --bf16"} for row in proved[:3]]
    runs = tables.equal_runs([*again, *proved[:3]])
    assert [run.is_reference for run in runs] == [True, False, False] * 2
    table = str(tables.equality_table(runs))
    assert table.count("`--swap-layers all --bf16`") == table.count("`--swap-layers all`") == 1


def test_a_run_that_died_is_no_reference_and_rescues_have_a_table(proved: list[Row]) -> None:
    row = proved[0]
    measured = {
        "rescues_by_step": [3, 5, 4], "num_rescues": 12, "rescued_bytes": 3 * GIB, "saved_peak_gib": 7.0,
        "first_step_ms": 2e3,
    }  # fmt: skip
    rows = [
        {**row, "method": "swap-layers none", "outcome": "oom_device", "losses": [], "step_ms_median": None},
        {**row, **measured, "method": "swap-layers none --swap-oom-guard", "flags": f"{row['flags']} --swap-oom-guard"},
        {**row, "method": "swap-memory-gib 7"},
    ]
    runs = tables.equal_runs(rows)
    assert [(run.is_reference, run.is_compared) for run in runs] == [(False, False), (True, False), (False, True)]
    assert [run.is_ours for run in runs] == [False, True, False]
    assert guard.guarded([*rows, {**row, "case": "another"}]) == rows
    lines = guard.table(rows).rows
    assert [line[4] for line in lines] == ["out of device memory", *["trained to the end"] * 2]
    assert lines[1][6] == "7.00"
    assert lines[1][8:14] == ["12", "3", "5", "3", "3.00", "2"]
    assert [line[-1] for line in lines] == ["–", "reference", "yes"]


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "yes"),
        ({"losses": ["0x1p+9"]}, "**no**"),
        ({"grad_norms": ["0x1p+9"]}, "**no**"),
        ({"weights_sha256": "others"}, "**no**"),
        ({"weights_sha256": None}, "yes, 1 steps"),
        ({"grad_norms": ["0x1p+0", "0x1p+0"]}, "yes, 1 steps"),
        ({"losses": None}, "–"),
        ({"grad_norms": []}, "–"),
        ({"rescued_bytes": None}, "yes"),
        ({"case": "another"}, "reference"),
        ({"num_ranks": 2}, "reference"),
        ({"versions": {"torch": "2.12.0"}}, "reference"),
        ({"flags": "--lr-decay-style linear --train-iters 2 --swap-oom-guard"}, "reference"),
    ],
)
def test_what_is_equal_and_what_cannot_be_compared(proved: list[Row], changed: Row, verdict: str) -> None:
    first = {
        **proved[0], "flags": "--lr-decay-style linear --train-iters 1 --swap-oom-guard", "losses": ["0x1p+0"],
        "grad_norms": ["0x1p+0"], "weights_sha256": "these",
    }  # fmt: skip
    assert guard.table([first, {**first, **changed}]).rows[-1][-1] == verdict


def test_what_a_trace_says(built: Path) -> None:
    (group,) = read_profiles(built / "results")
    assert [profile.profiler for profile in group.profiles] == ["Nsight Systems", "torch.profiler"]
    page, path = markdown_of(built), built / "results" / TRACED
    assert "Both profilers agree on" in page
    assert "times and shares of time mean nothing" not in page
    findings = json.loads(path.read_text())
    findings["steps"][0]["copies"]["num_out_copies"] += 1
    one = {"rule": "x", "rule_text": "the rule", "step": 3, "group": "g", "site": "layers.1/mlp/0", "by_us": 7.0}
    path.write_text(json.dumps({**findings, "violations": [one]}))
    page = markdown_of(built)
    assert "**The profilers disagree** on num_out_copies" in page
    assert "- **Violation** (torch.profiler): layers.1/mlp/0, step 3: the rule; by 7.0 µs." in page
    path.write_text(json.dumps({**findings, "emulated": True}))
    page = markdown_of(built)
    assert "times and shares of time mean nothing" in page
    assert "| torch.profiler, emulated device |" in page
    committed = next(RESULTS.glob("*-profile-*/step.png"))
    picture = shutil.copy(committed, path.parent)
    assert f"{picture} was not drawn from findings.json beside it" in check(built / "results", built)


# ------------------------------------------------------------------------------------------- the planner


def planned(method: str, step_ms: float | None, peak_gib: float | None, budget_gib: float, **fields: Any) -> Row:
    """Return a row that was planned for a budget. Its prediction is 1 % too high in memory and 2 % too low in time."""
    found: Row = {"swapped_out_bytes": 2**30, "swapped_in_bytes": 2**30, "is_ours": True}
    if step_ms is not None and peak_gib is not None:
        found |= {
            "budget_gib": budget_gib, "predicted_peak_gib": 1.01 * peak_gib, "predicted_step_ms": 0.98 * step_ms,
            "profile_sha256": "beef" * 16, "num_replans": 0,
        }  # fmt: skip
    return a_row(method, step_ms, peak_gib, f"--swap-memory-gib {budget_gib}", **{**found, **fields})


def planner_suite() -> list[Row]:
    """Return a suite whose reserved memory counts. It is 3 GiB more than the memory in use."""
    late = {"outcome": "not stable", "output_tail": "steps [13] were timed"}
    rows = [
        a_row("none", 700.0, 37.0),
        a_row("full-recompute", 900.0, 15.0, "--recompute-granularity full"),
        a_row("recompute-mlp", 800.0, 24.0, RECOMPUTE),
        ours("ours-all", 1200.0, 22.0, 18.0, "--swap-layers all"),
        planned("auto-20", 720.0, 26.0, 30.0, num_replans=3, losses_equal=True),
        planned("auto-10", 780.0, 16.0, 18.5),
        planned("auto-1", None, None, 11.0),
        planned("auto-2", 990.0, 10.0, 12.0, **late),
        planned("auto-3", 990.0, 10.0, 12.0, **late, step_ms_median=None, step_ms_all=[], tokens_per_s=None),
    ]
    for row in rows:
        held = None if row["device_peak_gib"] is None else row["device_peak_gib"] + 3.0
        row.update(suite="h200-planner", peak="reserved", device_reserved_gib=held, sequence_schedule=[])
    return rows


def test_planned_points_are_put_beside_the_peak_that_counts() -> None:
    first, second = planner.points(planner_suite())
    assert (first.row["method"], second.row["method"]) == ("auto-20", "auto-10"), "from the largest budget"
    assert (first.none or {})["method"] == "none"
    assert (first.baseline or {})["method"] == "recompute-mlp"
    assert (second.baseline or {})["method"] == "full-recompute"
    assert first.peak_error == pytest.approx(1.01 * 26.0 / 29.0 - 1.0), "26 GiB were given out, 29 held"
    assert first.step_error == pytest.approx(-0.02)
    assert first.is_within
    assert not second.is_within, "16 GiB were given out and 19 held, where 18.5 were allowed"
    assert methods_of(planner.failed(planner_suite())) == ["auto-1", "auto-2", "auto-3"]
    assert planner.largest([0.01, -0.03, None]) == 0.03
    assert planner.largest([None]) is None
