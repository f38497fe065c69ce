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

from benchmarks import names
from benchmarks.flags import is_ours, is_planned, recomputed_sites, shape, swapped_layers, swapped_modules
from benchmarks.pictures import digest_of
from benchmarks.report import compare, guard, planner, tables
from benchmarks.report.brief import Brief, planned_shown
from benchmarks.report.build import APPENDIX, BRIEF, HERE, build, build_suites, check
from benchmarks.report.cases import Case, Suite
from benchmarks.report.compare import Faster
from benchmarks.report.profiles import read_profiles
from benchmarks.report.results import Results, read_results
from benchmarks.report.selection import current
from benchmarks.rows import GIB, Row, RowError, write_rows
from benchmarks.suites import losses
from benchmarks.suites.ranking import by_peak, fastest_within, on_frontier
from benchmarks.suites.table import methods_table
from benchmarks.table import Table
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


@pytest.mark.parametrize("page", [BRIEF, APPENDIX])
def test_no_figure_is_typed_into_a_template(page: str) -> None:
    assert figures_by_hand((HERE / f"{page}.j2").read_text()) == []


@pytest.mark.parametrize("planted", ["It is 1.12x faster.", "costs {{ 3.5 }} ms", "some % slower", "twice as fast"])
def test_a_figure_typed_by_hand_is_caught(planted: str) -> None:
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


def test_a_picture_of_other_findings_is_noticed(built: Path) -> None:
    committed = next(RESULTS.glob("*-profile-*/step.png"))
    assert digest_of(committed) is not None
    picture = shutil.copy(committed, built / "results" / TRACED.split("/")[0])
    assert f"{picture} was not drawn from findings.json beside it" in check(built / "results", built)


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_the_command_line_names_what_it_cannot_read(built: Path, tmp_path: Path, flags: list[str]) -> None:
    change(built / "results" / "h200-dense.jsonl", '"commit": "0123456789", ', "")
    for folder, said in ((built / "results", "field 'commit' is missing"), (tmp_path / "nowhere", "is no folder")):
        command = [sys.executable, "tools/report.py", "--results", str(folder), "--output", str(built), *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


@pytest.mark.slow
def test_the_command_line_exits_non_zero_when_they_disagree(built: Path) -> None:
    command = [sys.executable, "tools/report.py", "--results", str(built / "results"), "--output", str(built)]
    change(built / "benchmarks" / "appendix.md", "860.0", "860.1")
    assert subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, check=False).returncode == 1
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_rows_that_break_the_schema_are_named(built: Path) -> None:
    change(built / "results" / "h200-dense.jsonl", '"commit": "0123456789", ', "")
    with pytest.raises(RowError, match=r"h200-dense\.jsonl:1 .*'commit' is missing"):
        read_results(built / "results")


def test_without_results_there_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for page in (BRIEF, APPENDIX):
        assert "| ---" not in markdown_of(tmp_path, page)


def test_runs_repeated_on_another_day_are_not_in_the_report(built: Path) -> None:
    write_rows(built / "results" / "h200-dense-again.jsonl", [{**row, "case": "long ago"} for row in suite()])
    assert "long ago" not in markdown_of(built)


def test_of_repeated_runs_the_last_one_counts() -> None:
    first, second = a_row("none", 1.0, 1.0), a_row("none", 2.0, 1.0)
    other_budget = {**a_row("none", 3.0, 1.0), "budget_gib": 9.0}
    pruned = {**a_row("none", None, None), "outcome": "pruned"}
    assert current([first, other_budget, second, pruned]) == [other_budget, second]
    assert current([pruned, first]) == [first]
    verified = [{**first, "suite": "prove-equality"}] * 2
    assert current(verified) == verified
    results = Results(Path(), [("h200-dense.jsonl", [*suite(), second])], [], [])
    assert [row for row in results.suites["h200-dense"] if row["method"] == "none"] == [second]


def test_benchmarks_are_put_beside_those_of_their_file_alone() -> None:
    left, *rows = suite()
    files = [("h200-dense.jsonl", rows), ("more.jsonl", [left, {**left, "suite": "h200-guard"}])]
    results = Results(Path(), files, [], [])
    assert {name: len(found) for name, found in results.suites.items()} == {
        "h200-dense": len(rows), "h200-dense, more.jsonl": 1, "h200-guard, more.jsonl": 1
    }  # fmt: skip
    suites = {suite.name: suite for suite in build_suites(results, Path())}
    assert [case.name for case in suites["h200-dense, more.jsonl"].cases] == [left["case"]]


# ------------------------------------------------------------------------------------------- names and flags


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
    planned = a_row("x", 1.0, 1.0, "--swap-plan p.json", is_ours=True, budget_gib=134.0)
    assert names.method(planned) == "plan file, 134 GiB"


def test_every_committed_method_has_a_name() -> None:
    for _, rows in read_results(RESULTS).files:
        for row in rows:
            if "is_ours" in row and row["outcome"] == "ok":
                assert names.method(row) != row["method"] or row["suite"].startswith("prove-"), row["method"]


def test_flags_are_read() -> None:
    row = a_row("x", 1.0, 1.0, f"--swap-layers all --swap-modules mlp self_attention {RECOMPUTE}")
    assert (shape(row).num_layers, shape(row).num_micro_batches) == (8, 2)
    assert (swapped_layers(row), swapped_modules(row)) == ("all", "mlp self_attention")
    sites = a_row("x", 1.0, 1.0, "--swap-layers none --swap-recompute norm activation --bf16")
    assert (swapped_layers(sites), recomputed_sites(sites), is_ours(sites)) == (None, "norm activation", True)
    assert recomputed_sites(row) is None
    for more, mine in (
        ("", False), ("--swap-optimizer 0", False), ("--swap-optimizer 0.5", True), ("--swap-plan x.json", True),
    ):  # fmt: skip
        assert is_ours(a_row("x", 1.0, 1.0, more)) == mine
    assert is_planned(a_row("x", 1.0, 1.0, "--swap-memory-gib 9"))
    with pytest.raises(ValueError, match="h200-dense, small, x: the row's flags have no --num-layers"):
        shape({**row, "flags": "--micro-batch-size 4"})


def test_a_method_with_other_flags_in_each_case_is_told_for_each() -> None:
    def case(name: str, gib: int) -> Case:
        planned = a_row("auto-60%", 710.0, 30.0, f"--swap-memory-gib {gib}", case=name)
        return Case(name, [a_row("none", 700.0, 40.0, case=name), planned], None)

    assert [(method, more, case) for method, _, more, case in Suite("x", [case("a", 5), case("b", 6)]).legend()] == [
        ("none", "", ""), ("auto-60%", "--swap-memory-gib 5", "a"), ("auto-60%", "--swap-memory-gib 6", "b")
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- comparison


def test_the_frontier() -> None:
    assert methods_of(on_frontier(suite())) == ["full-recompute", "ours-mlp", "recompute-mlp", "ours-0-1", "none"]


def test_by_peak_failures_come_last() -> None:
    rows = by_peak(suite())
    assert methods_of(rows)[:3] == ["full-recompute", "ours-mlp", "ours-all"]
    assert methods_of(rows)[3:5] == ["recompute-mlp", "slow"]  # one peak: the faster one first
    assert methods_of(rows)[-3:] == ["dies", "cannot", "ours-dies"]


def test_the_best_peer_of_each_point() -> None:
    duels = compare.duels(suite())
    assert [(duel.ours["method"], duel.baseline and duel.baseline["method"], duel.faster) for duel in duels] == [
        ("ours-mlp", "full-recompute", Faster.OURS),
        ("ours-all", "full-recompute", Faster.BASELINE),
        ("ours-0-1", "recompute-mlp", Faster.OURS),
    ]
    assert duels[0].ratio == pytest.approx(900 / 860)


@pytest.mark.parametrize(("baseline_peak", "is_within"), [(24.0, True), (24.004, True), (24.006, False), (25.0, False)])
def test_same_peak_means_the_same_when_printed(baseline_peak: float, is_within: bool) -> None:
    rows = [a_row("baseline", 500.0, baseline_peak, RECOMPUTE), ours("mine", 400.0, 24.0, 1.0, "--swap-layers all")]
    assert (compare.duels(rows)[0].baseline is not None) == is_within


def test_of_equally_fast_peers_the_smaller_counts_then_the_first_name() -> None:
    baselines = [a_row("c", 500.0, 25.0), a_row("b", 500.0, 24.0), a_row("a", 500.0, 25.0)]
    for rows, best in ((baselines, "b"), ([baselines[0], baselines[2]], "a")):
        found = fastest_within(rows, 30.0)
        assert found is not None
        assert found["method"] == best


def test_steps_that_overlap_are_not_called_faster() -> None:
    one = a_row("one", 500.0, 20.0)
    assert compare.faster(one, a_row("nearly", 504.9, 20.0)) is Faster.NEITHER  # apart, but by less than noise
    assert compare.faster(one, a_row("slower", 506.0, 20.0)) is Faster.OURS
    assert compare.faster(one, a_row("faster", 494.0, 20.0)) is Faster.BASELINE
    assert compare.faster(one, a_row("wide", 506.0, 20.0, step_ms_all=[490.0, 506.0, 508.0])) is Faster.NEITHER
    one["step_ms_all"] = [400.0, 500.0, 900.0]  # one slow step does not hide a difference of the middle half
    assert compare.middle_half(one) == (450.0, 700.0)
    assert compare.middle_half({**one, "step_ms_all": [500.0]}) == (500.0, 500.0)


def test_runs_without_a_peak_or_a_result_are_compared_with_nothing() -> None:
    rows = [a_row("cpu", 10.0, None), a_row("dies", None, None), ours("mine", 9.0, None, 1.0, "--swap-layers all")]
    assert compare.duels(rows) == compare.losses(rows) == on_frontier(rows) == []
    assert methods_of(by_peak(rows)) == ["cpu", "mine", "dies"]


def test_where_a_peer_is_better() -> None:
    found = compare.losses(suite())
    told = [(loss.baseline["method"], loss.ours and loss.ours["method"]) for loss in found]
    assert told == [("full-recompute", None), ("recompute-mlp", "ours-mlp")]
    worse = compare.losses([row for row in suite() if row["method"] != "ours-mlp"])[1]
    assert (worse.ours or {})["method"] == "ours-all"
    assert worse.ratio == pytest.approx(1.5)


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


def test_losses_that_differ_by_more_than_noise_are_bold() -> None:
    row = a_row("x", 1.0, 1.0, losses_equal=False, loss_max_rel_diff=2e-3)
    assert losses.cell(row, 1e-3) == "2.0e-03"
    assert losses.cell(row, 1e-5) == "**other losses: 2.0e-03**"
    assert losses.cell({**row, "losses_equal": True}, None) == "equal"
    assert losses.cell(a_row("dies", None, None), None) is None
    assert not losses.is_beyond_noise(row, None), "few rows tell no noise"
    assert losses.is_beyond_noise({**row, "loss_max_rel_diff": 0.1}, None)
    again = a_row("none-again", 1.0, 1.0, losses_equal=False, loss_max_rel_diff=1e-4)
    assert losses.loss_noise([a_row("none", 1.0, 1.0), again, row]) == 1e-4


def test_failed_runs_keep_their_line_and_numbers_stand_to_the_right() -> None:
    lines = {line[0]: line[1] for line in methods_table(suite()).rows}
    assert lines["dies"] == "out of device memory"
    assert lines["cannot"] == "refused by upstream"
    assert lines["**ours-0-1** ★"] == "701.0 (700.0–702.0)"
    table = Table(["a", "b", "c"], [["x", "1.0 (0.5–2.0)", "y"], ["z", "–", "3 × GPU"]])
    assert str(table).splitlines()[1] == "| --- | ---: | --- |"


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


def test_a_table_of_runs_under_a_budget_keeps_the_best_other_methods() -> None:
    planned = ours("auto", 720.0, 28.0, 6.0, "--swap-memory-gib 30", is_ours=True, budget_gib=30.0)
    fixed = ours("planned", 720.0, 28.0, 6.0, "--swap-plan p.json", is_ours=True, budget_gib=30.0)
    offload = a_row("offload-attention-recompute-mlp", 950.0, 26.0, "--fine-grained-activation-offloading")
    shown = methods_of(planned_shown([*suite(), offload, planned, fixed]))
    assert shown == ["none", "recompute-mlp", "full-recompute", "offload-attention-recompute-mlp", "auto"]


@pytest.mark.slow
def test_only_runs_with_an_unswapped_reference_count_as_equal() -> None:
    page = markdown_of(ROOT / "docs", BRIEF)
    assert "| one GPU | 39 | 39 |" in page, "the guarded run's reference is a guarded one"
    assert re.search(r"no offload \| out of device memory", page)


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


def test_runs_that_train_the_same_are_compared_whichever_command_made_them(proved: list[Row]) -> None:
    row = proved[0]
    guarded = {**row, "flags": f"{row['flags']} --swap-oom-guard", "rescues_by_step": [1, 0, 0]}
    flags = re.sub(r"--train-iters \d+", "--train-iters 99", guarded["flags"])
    assert flags != guarded["flags"]
    longer = {
        **guarded, "command": "another", "flags": flags,
        "losses": [*row["losses"], "0x1p+0"], "grad_norms": [*row["grad_norms"], "0x1p+0"], "held_gib": [0, 35.5],
    }  # fmt: skip
    of_another = {**guarded, "command": "one more", "flags": f"{guarded['flags']} --seq-length 8"}
    assert guard.guarded([guarded, of_another, longer]) == [guarded, longer, of_another]
    lines = guard.table([guarded, longer, of_another]).rows
    assert [line[-1] for line in lines] == ["reference", f"yes, {len(row['losses'])} steps", "reference"]
    assert [line[3] for line in lines] == ["–", "0 and 35.5", "–"]
    assert lines[0][9:12] == ["1", "1", "1"]


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


# ------------------------------------------------------------------------------------------- traces


def findings(docs: Path) -> dict[str, Any]:
    return dict(json.loads((docs / "results" / TRACED).read_text()))


def rewrite(docs: Path, **changed: Any) -> str:
    """Change findings and return the page."""
    (docs / "results" / TRACED).write_text(json.dumps({**findings(docs), **changed}))
    return markdown_of(docs)


def test_two_profilers_of_one_run_stand_side_by_side(built: Path) -> None:
    (group,) = read_profiles(built / "results")
    assert group.subject == "1.3b"
    assert [profile.profiler for profile in group.profiles] == ["Nsight Systems", "torch.profiler"]
    assert group.differences == []
    assert "Both profilers agree on" in markdown_of(built)
    steps = findings(built)["steps"]
    steps[0]["copies"]["num_out_copies"] += 1
    assert "**The profilers disagree** on num_out_copies" in rewrite(built, steps=steps)


def test_times_of_an_emulated_device_are_said_to_mean_nothing(built: Path) -> None:
    sentence = "times and shares of time mean nothing"
    assert sentence not in markdown_of(built)
    report = rewrite(built, emulated=True)
    assert sentence in report
    assert "| torch.profiler, emulated device |" in report


def test_traces_are_among_the_sources(built: Path) -> None:
    about = {"commit": "0123456789", "command": "c", "versions": {}, "machine": {"gpu": "Some GPU"}, "link": None}
    report = rewrite(built, about=about)
    row = "| [h200-profile-1.3b-torch](../results/h200-profile-1.3b-torch) | torch.profiler | 2 | Some GPU | 0123456 |"
    assert row in report
    assert "Steps traced in each run: 2." in report


def test_violations_are_told(built: Path) -> None:
    one = {"rule": "x", "rule_text": "the rule", "step": 3, "group": "g", "site": "layers.1/mlp/0", "by_us": 7.0}
    told = "- **Violation** (torch.profiler): layers.1/mlp/0, step 3: the rule; by 7.0 µs."
    assert told in rewrite(built, violations=[one])


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


def test_a_peer_is_one_that_fits_the_budget_and_saves_something() -> None:
    rows = [row for row in planner_suite() if row["method"] in ("none", "auto-20")]
    assert planner.points([*rows, {**rows[0], "method": "none-again"}])[0].baseline is None
    wide = planned("auto-40", 700.0, 30.0, 50.0)
    assert planner.points([rows[0], wide])[0].baseline is None, "not swapping fits, and is no way of saving memory"


def test_duels_and_frontier_are_of_the_peak_that_counts() -> None:
    rows = planner_suite()
    rows[2]["device_reserved_gib"] = 29.5  # gave out less than ours, and held more
    duels = {duel.ours["method"]: duel.baseline and duel.baseline["method"] for duel in compare.duels(rows)}
    assert duels["auto-20"] == "full-recompute"
    assert methods_of(on_frontier(rows)) == ["full-recompute", "auto-10", "auto-20", "none"]


def test_the_section_on_the_planner(tmp_path: Path) -> None:
    rows = planner_suite()
    write_rows(tmp_path / "results" / "h200-planner.jsonl", rows)
    report = markdown_of(tmp_path)
    text = report.split("## The planner\n")[1].split("\n## ")[0]
    first, second = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| **")]
    assert first[:7] == ["**auto-20**", "found in the run", "30.00", "26.26", "29.00", "-9.4 %", "yes"]
    assert first[7:] == ["705.6", "720.0", "-2.0 %", "1.029", "recompute-mlp", "1.143", "3", "equal"]
    assert second[:7] == ["**auto-10**", "found in the run", "18.50", "16.16", "19.00", "-14.9 %", "**no**"]
    assert second[7:] == ["764.4", "780.0", "-2.0 %", "1.114", "full-recompute", "1.286", "0", "0.0e+00"]
    assert "- `auto-1`: out of device memory: `CUDA out of memory`." in text
    assert "- `auto-2`: timed before its plan was stable: `steps [13] were timed`." in text
    page = re.sub(r"\s+", " ", markdown_of(tmp_path, BRIEF))
    kept = "1 of 2 planned runs kept their budget. Predictions were off by at most 14.9 % of the peak and 2.0 % of the"
    assert kept in page
    assert "The peak is the allocator's reserved memory." in report
    (line,) = [line for line in report.splitlines() if line.startswith("| full-recompute")]
    assert line.split(" | ")[3:6] == ["18.00", "8.00", "15.00"], "held, without static, given out"
    lengths = {"sequence_schedule": [[50, 64], [9, 32]]}
    rows = [{**row, **lengths, "flags": f"{row['flags']} --swap-deterministic"} for row in rows]
    write_rows(tmp_path / "results" / "h200-planner.jsonl", rows)
    report = markdown_of(tmp_path)
    assert "The sequence length changes: 50 steps of 64 tokens and 9 steps of 32 tokens, repeatedly." in report
    assert "All kernels are deterministic" in report


def test_bounds_and_plan_files_are_shown_where_rows_have_them() -> None:
    with_bound = planned("auto-20", 720.0, 26.0, 30.0, lower_bound_ms=700.0)
    unknown = planned("auto-5", 790.0, 15.0, 17.0, lower_bound_ms=None)
    unknown["flags"] = unknown["flags"].replace("--swap-memory-gib 17.0", "--swap-plan docs/results/L16-24.json")
    rows = [with_bound, planned("auto-10", 780.0, 16.0, 18.5), unknown]
    table = planner.points_table(planner.points(rows), rows)
    at = table.head.index("no plan below, ms")
    assert table.head[at - 1 : at + 3] == ["error", "no plan below, ms", "measured above it", "× none"]
    assert [line[at : at + 2] for line in table.rows] == [["700.0", "+2.9 %"], ["–", "–"], ["–", "–"]]
    assert "no plan below, ms" not in planner.points_table(planner.points(rows[1:]), rows).head
    assert table.rows[2][1] == "`L16-24.json`"


def test_another_budget_is_another_picture(tmp_path: Path) -> None:
    def picture(rows: list[Row]) -> Any:
        (found,) = build_suites(Results(Path(), [("h200-planner.jsonl", rows)], [], []), tmp_path)[0].cases
        assert found.picture is not None
        return found.picture

    rows = planner_suite()
    picture(rows).save()
    assert picture(rows).is_current
    rows[4]["budget_gib"] = 31.0
    assert not picture(rows).is_current
