"""The report matches the results; fabricated results show that the check notices differences."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.flags import (
    is_ours,
    means,
    recomputed_sites,
    shape,
    swapped_layers,
    swapped_modules,
    without_swap,
)
from benchmarks.report import guard, overhead, tables
from benchmarks.report.build import APPENDIX, BRIEF, HERE, build, build_suites, check
from benchmarks.report.cases import Case, Suite
from benchmarks.report.page import joined, to_html
from benchmarks.report.profiles import read_profiles
from benchmarks.report.results import read_results
from benchmarks.report.text import Table
from benchmarks.rows import GIB, Row, RowError, write_rows
from benchmarks.stamp import KEYWORD, stamp_of, with_text
from benchmarks.suites import losses
from tests.unit.benchmarks.made_report import (
    RECOMPUTE,
    RESULTS,
    ROOT,
    a_row,
    markdown_of,
    suite,
)

# ------------------------------------------------------------------------------------------- what is committed


def test_the_committed_report_says_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, "tools/report.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_result_file_is_in_the_index() -> None:
    """And the index names no file that is not there."""
    index = (ROOT / "docs" / "dev" / "results.md").read_text()
    files = {_indexed(path.name) for path in RESULTS.iterdir()}
    listed = re.findall(r"^\| `([^`]+)` \|", index, flags=re.MULTILINE)
    assert sorted(files) == sorted(listed)


def _indexed(name: str) -> str:
    """Folders of traces are indexed by pattern."""
    return "h200-profile-*" if "-profile-" in name else name


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


# ------------------------------------------------------------------------------------- building and checking


def test_what_is_built_agrees_and_is_read_only_from_results(made: Path) -> None:
    written = {path.relative_to(made).as_posix() for path in build(made / "results", made)}
    assert written == {
        "benchmarks.md", "benchmarks/appendix.md", "benchmarks/report.html", "benchmarks/h200-dense-small.png",
        "benchmarks/overhead.png",
    }  # fmt: skip
    assert check(made / "results", made) == []


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("h200-dense.jsonl", '"step_ms_median": 860.0', '"step_ms_median": 861.0', "861.0"),
        ("h200-overhead.jsonl", '"device_peak_gib": 86.19', '"device_peak_gib": 85.19', "85.2"),
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


def test_a_missing_report_is_noticed(made: Path) -> None:
    assert check(made / "results", made) == [
        f"{made / page} is missing" for page in ("benchmarks.md", "benchmarks/appendix.md")
    ]


def test_a_stale_picture_is_noticed_and_renewed(built: Path) -> None:
    assert check(built / "results", built) == []
    change(built / "results" / "h200-dense.jsonl", '"step_ms_min": 859.0', '"step_ms_min": 858.0')
    picture = built / "benchmarks" / "h200-dense-small.png"
    assert f"{picture} is missing or shows other figures" in check(built / "results", built)
    build(built / "results", built)
    assert check(built / "results", built) == []


def test_a_stale_page_is_noticed_where_there_is_one(built: Path) -> None:
    page = built / "benchmarks" / "report.html"
    page.write_text(page.read_text() + "<!-- old -->")
    assert check(built / "results", built) == [f"{page} is stale"]
    page.unlink()
    assert check(built / "results", built) == []


def test_a_picture_of_other_findings_is_noticed(built: Path) -> None:
    picture = built / "results" / "h200-profile-1.3b-nsys" / "step.png"
    whole = picture.read_bytes()
    (built / "benchmarks" / "report.html").unlink()
    picture.write_bytes(whole.replace(stamp_of(picture).encode(), b"0" * 64))  # type: ignore[union-attr]
    assert check(built / "results", built) == [f"{picture} was not drawn from findings.json beside it"]
    picture.write_bytes(whole.replace(KEYWORD + b"\0", b"Ignore\0", 1))
    assert check(built / "results", built) == [], "without a digest nothing can be told"


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_the_command_line_names_what_it_cannot_read(made: Path, tmp_path: Path, flags: list[str]) -> None:
    change(made / "results" / "h200-dense.jsonl", '"commit": "0123456789", ', "")
    for folder, said in ((made / "results", "field 'commit' is missing"), (tmp_path / "nowhere", "is no folder")):
        command = [sys.executable, "tools/report.py", "--results", str(folder), "--output", str(made), *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


@pytest.mark.slow
def test_the_command_line_exits_non_zero_when_they_disagree(built: Path) -> None:
    command = [sys.executable, "tools/report.py", "--results", str(built / "results"), "--output", str(built)]
    change(built / "benchmarks" / "appendix.md", "3.94", "3.95")
    assert subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, check=False).returncode == 1
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, check=False).returncode == 0


def test_a_row_that_breaks_the_schema_is_named(made: Path) -> None:
    change(made / "results" / "h200-dense.jsonl", '"commit": "0123456789", ', "")
    with pytest.raises(RowError, match=r"h200-dense\.jsonl:1 .*'commit' is missing"):
        read_results(made / "results")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        read_results(tmp_path / "nowhere")


def test_without_results_each_section_names_its_command(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    report = markdown_of(tmp_path)
    assert "GPU GiB |" not in markdown_of(tmp_path, BRIEF), "no table without results"
    missing = re.findall(r"\*Not measured yet:\* `(?:python tools/|bash tools/)(\S+(?: --suite \S+| \w+)?)", report)
    suites = ("h200-dense", "h200-long-context", "h200-moe", "h200-optimizer", "h200-planner")
    wanted = {"sweep.py", "profile.sh", "verify.py overhead", "verify.py equality", "verify.py ranks"}
    wanted |= {f"bench.py --suite {name}" for name in suites}
    assert {name.removesuffix(" --swap-layers") for name in missing} == wanted


def test_runs_repeated_on_another_day_are_not_in_the_report(made: Path) -> None:
    rows = [{**row, "case": "long ago"} for row in suite()]
    write_rows(made / "results" / "h200-dense-again.jsonl", rows)
    assert "long ago" not in markdown_of(made)


def pages(folder: Path) -> list[str]:
    return [(folder / BRIEF).read_text(), (folder / "benchmarks" / APPENDIX).read_text()]


def test_the_page_needs_nothing_else(built: Path) -> None:
    page, report = (built / "benchmarks" / "report.html").read_text(), joined(*pages(built))
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 1 + 2 + 2  # the diagram, the two pictures above, a step of each trace
    assert all(source.startswith("data:image/") for source in sources)
    assert not re.search(r"<link|<script|@import|url\(", page)
    assert page.count("<table>") == len(re.findall(r"^\| ?---", report, flags=re.MULTILINE))


def test_pictures_of_the_page_become_data(tmp_path: Path) -> None:
    (tmp_path / "dot.svg").write_text("<svg/>")
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+"' in to_html("# T\n\n![a dot](dot.svg)\n", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"absent\.png"):
        to_html("![absent](absent.png)", tmp_path)


def test_a_note_in_a_picture_needs_a_picture() -> None:
    with pytest.raises(ValueError, match="not a PNG"):
        with_text(b"GIF89a", KEYWORD, b"x")


# --------------------------------------------------------------------------------------------------- overhead


def test_a_swapped_run_beside_its_base() -> None:
    steps = overhead.ladder(suite())
    assert [(step.row["method"], step.unswapped["method"]) for step in steps] == [
        ("ours-0-1", "none"), ("ours-all", "none"), ("ours-mlp", "recompute-mlp"),
    ]  # fmt: skip
    few, everything, mixed = steps
    assert few.out_gib == pytest.approx(4.5)
    assert few.out_ms == pytest.approx(4.5 * GIB / 50e6)
    assert (few.fell_gib, few.predicted_out, few.predicted_hidden) == (4.5, 1.0, 1.0)
    assert few.measured_hidden == pytest.approx(1 - 0.5 / (2 * 4.5 * GIB / 50e6))
    copies_ms = 18 * GIB / 50e6
    assert everything.predicted_out == pytest.approx(100 / copies_ms)
    assert everything.predicted_hidden == pytest.approx((100 + 200) / (2 * copies_ms))
    assert everything.measured_hidden == pytest.approx(1 - 250 / (2 * copies_ms))
    assert mixed.ratio == pytest.approx(860 / 800)
    assert mixed.predicted_hidden is None


def test_a_shape_and_what_is_free_there() -> None:
    cost = overhead.case_cost(suite())
    assert cost is not None
    assert cost.everything is not None
    assert cost.everything.row["method"] == "ours-all"
    assert cost.free is not None
    assert cost.free.row["method"] == "ours-0-1"
    assert overhead.case_cost([row for row in suite() if row["method"] != "none"]) is None


def test_flags_are_read() -> None:
    row = a_row("x", 1.0, 1.0, f"--swap-layers all --swap-modules mlp self_attention {RECOMPUTE}")
    assert (shape(row).num_layers, shape(row).num_micro_batches) == (8, 2)
    assert (swapped_layers(row), swapped_modules(row)) == ("all", "mlp self_attention")
    sites = a_row("x", 1.0, 1.0, "--swap-layers none --swap-recompute norm activation --bf16")
    assert (swapped_layers(sites), recomputed_sites(sites), is_ours(sites)) == (None, "norm activation", True)
    assert recomputed_sites(row) is None
    assert without_swap(row) == without_swap(a_row("y", 1.0, 1.0, RECOMPUTE))
    assert swapped_layers(a_row("none", 1.0, 1.0, "--swap-layers none")) is None
    assert means(row) == {"recomputes"}
    wrapped = a_row("z", 1.0, 1.0, wrap="benchmarks.suites.baselines:deepspeed_checkpoint")
    assert means(wrapped) == {"recomputes", "offloads"}
    with pytest.raises(ValueError, match="h200-dense, small, x: the row's flags have no --num-layers"):
        shape({**row, "flags": "--micro-batch-size 4"})


# ----------------------------------------------------------------------------------------- tables and traces


def test_losses_that_differ_by_more_than_noise_are_bold() -> None:
    row = a_row("x", 1.0, 1.0, losses_equal=False, loss_max_rel_diff=2e-3)
    assert losses.cell(row, 1e-3) == "2.0e-03"
    assert losses.cell(row, 1e-5) == "**other losses: 2.0e-03**"
    assert losses.cell({**row, "losses_equal": True}, None) == "equal"
    assert losses.cell(a_row("dies", None, None), None) is None


def test_failed_runs_keep_their_line() -> None:
    lines = {line[0]: line[1] for line in tables.methods_table(suite()).rows}
    assert lines["dies"] == "out of device memory"
    assert lines["cannot"] == "refused by upstream"
    assert lines["**ours-0-1** ★"] == "701.0 (700.0–702.0)"


def test_the_first_run_of_a_case_is_its_reference(made: Path) -> None:
    runs = tables.equal_runs(read_results(made / "results").suites["prove-equality"])[:6]
    assert [run.is_reference for run in runs] == [True, False, False] * 2
    assert [run.is_ours for run in runs] == [False, False, True] * 2
    assert all(run.is_equal for run in runs)
    broken = tables.EqualRun({**runs[2].row, "grad_norms_equal": False}, False, True)
    assert not broken.is_equal
    assert "**differ**" in str(tables.equality_table([broken]))


def test_a_run_that_died_is_no_reference_and_rescues_have_a_table(made: Path) -> None:
    row = read_results(made / "results").suites["prove-equality"][0]
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


def test_runs_that_train_the_same_are_compared_whichever_command_made_them(made: Path) -> None:
    row = read_results(made / "results").suites["prove-equality"][0]
    guarded = {**row, "flags": f"{row['flags']} --swap-oom-guard", "rescues_by_step": [1, 0, 0]}
    flags = re.sub(r"--train-iters \d+", "--train-iters 99", guarded["flags"])
    assert flags != guarded["flags"]
    longer = {
        **guarded, "command": "another", "flags": flags,
        "losses": [*row["losses"], "0x1p+0"], "grad_norms": [*row["grad_norms"], "0x1p+0"], "held_gib": [0, 35.5],
    }  # fmt: skip
    of_another = {**guarded, "command": "one more", "flags": f"{guarded['flags']} --seq-length 8"}
    assert guard.guarded([guarded, of_another, longer]) == [guarded, longer, of_another]
    num_steps = len(row["losses"])
    lines = guard.table([guarded, longer, of_another]).rows
    assert [line[-1] for line in lines] == ["reference", f"yes, {num_steps} steps", "reference"]
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
def test_what_is_equal_and_what_cannot_be_compared(made: Path, changed: Row, verdict: str) -> None:
    row = read_results(made / "results").suites["prove-equality"][0]
    first = {
        **row, "flags": "--lr-decay-style linear --train-iters 1 --swap-oom-guard", "losses": ["0x1p+0"],
        "grad_norms": ["0x1p+0"], "weights_sha256": "these",
    }  # fmt: skip
    assert guard.table([first, {**first, **changed}]).rows[-1][-1] == verdict


def test_what_the_guard_costs_is_told_beside_the_same_run_without() -> None:
    flags = "--num-layers 2 --swap-layers 0-1"
    rows = [
        a_row("none", 100.0, 9.0, flags="--num-layers 2"),
        a_row("guard", 101.0, 9.0, flags="--num-layers 2 --swap-layers none --swap-oom-guard"),
        a_row("ours", 110.0, 7.0, flags=flags, step_ms_rounds=[100.0, 104.0]),
        a_row("ours-guard", 110.0, 7.0, flags=f"{flags} --swap-oom-guard", step_ms_rounds=[100.0, 101.0]),
        a_row("alone", 110.0, 7.0, flags="--num-layers 2 --swap-layers 0 --swap-oom-guard"),
    ]
    costs = guard.costs([Case("one", rows, None, [])])
    assert costs is not None
    assert [line[1:] for line in costs.rows] == [
        ["`none`", "100.0", "`guard`", "101.0", "1.010", "–"],
        ["`ours`", "110.0", "`ours-guard`", "110.0", "1.000", "up to 4.0 %"],
    ]
    assert guard.costs([Case("one", rows[:1], None, [])]) is None


def test_benchmarks_are_put_beside_those_of_their_file_alone(made: Path) -> None:
    there = made / "results" / "h200-dense.jsonl"
    another = made / "results" / "more.jsonl"
    rows = [json.loads(line) for line in there.read_text().splitlines()]
    left = rows.pop()
    write_rows(there, rows)
    write_rows(another, [left, {**left, "suite": "h200-guard"}])
    results = read_results(made / "results")
    assert {name: len(found) for name, found in results.suites.items() if name.startswith("h200")} == {
        "h200-dense": len(rows), "h200-dense, more.jsonl": 1, "h200-guard, more.jsonl": 1
    }  # fmt: skip
    suites = {suite.name: suite for suite in build_suites(results, made / "benchmarks")}
    assert [case.name for case in suites["h200-dense, more.jsonl"].cases] == [left["case"]]
    there.unlink()
    names = [suite.name for suite in build_suites(read_results(made / "results"), made / "benchmarks")]
    assert "h200-dense" not in names, "it was measured, in a file of another name"
    assert "h200-moe" in names


def test_where_there_are_no_peers_nothing_is_put_beside_them() -> None:
    rows = suite()
    case = Case("one", rows, None, [])
    alone = Case("one", [row for row in rows if row["method"] == "none" or is_ours(row)], None, [])
    assert case.has_peers
    assert case.duels
    assert not alone.has_peers
    assert alone.duels == []


def test_each_command_compares_with_a_run_of_its_own(made: Path) -> None:
    rows = read_results(made / "results").suites["prove-equality"][:3]
    again = [{**row, "command": "another", "flags": f"{row['flags']} --bf16"} for row in rows]
    runs = tables.equal_runs([*again, *rows])
    assert [run.is_reference for run in runs] == [True, False, False] * 2
    table = str(tables.equality_table(runs))
    assert table.count("`--swap-layers all --bf16`") == table.count("`--swap-layers all`") == 1


def test_optimizer_state_at_rest_is_ours_and_no_rung_of_the_ladder() -> None:
    rows = suite()
    row = next(row for row in rows if is_ours(row) and overhead.rung(row, rows) is not None)
    assert not is_ours({**row, "flags": "--num-layers 2"})
    assert not is_ours({**row, "flags": "--num-layers 2 --swap-optimizer 0"})
    assert is_ours({**row, "flags": "--num-layers 2 --swap-optimizer 0.5"})
    assert overhead.rung({**row, "flags": f"{row['flags']} --swap-optimizer 0.5"}, rows) is None
    assert means({**row, "flags": "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"}) == {"offloads"}


def test_numbers_stand_to_the_right() -> None:
    table = Table(["a", "b", "c"], [["x", "1.0 (0.5–2.0)", "y"], ["z", "–", "3 × GPU"]])
    assert str(table).splitlines()[1] == "| --- | ---: | --- |"


def test_a_method_with_other_flags_in_each_case_is_told_for_each() -> None:
    def rows(case: str, gib: int) -> list[Row]:
        budget = f"--swap-memory-gib {gib}"
        return [a_row("none", 700.0, 40.0, case=case), a_row("auto-60%", 710.0, 30.0, budget, case=case)]

    suite = Suite("h200-dense", "", [Case("a", rows("a", 5), None, []), Case("b", rows("b", 6), None, [])], [])
    assert [(method, more, case) for method, _, more, case in suite.legend()] == [
        ("none", "", ""), ("auto-60%", "--swap-memory-gib 5", "a"), ("auto-60%", "--swap-memory-gib 6", "b")
    ]  # fmt: skip


def test_two_profilers_of_one_run_stand_side_by_side(made: Path) -> None:
    (group,) = read_profiles(made / "results")
    assert group.subject == "1.3b"
    assert [profile.profiler for profile in group.profiles] == ["Nsight Systems", "torch.profiler"]
    assert group.differences == []
    assert "Both profilers agree on" in markdown_of(made)
    path = made / "results" / "h200-profile-1.3b-torch" / "findings.json"
    found = json.loads(path.read_text())
    found["steps"][0]["copies"]["num_out_copies"] += 1
    path.write_text(json.dumps(found))
    assert "**The profilers disagree** on num_out_copies" in markdown_of(made)


def test_times_of_an_emulated_device_are_said_to_mean_nothing(made: Path) -> None:
    sentence = "times and shares of time mean nothing"
    assert sentence not in markdown_of(made)
    path = made / "results" / "h200-profile-1.3b-torch" / "findings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "emulated": True}))
    report = markdown_of(made)
    assert sentence in report
    assert "| torch.profiler, emulated device |" in report


def test_traces_are_among_the_sources(made: Path) -> None:
    path = made / "results" / "h200-profile-1.3b-torch" / "findings.json"
    about = {"commit": "0123456789", "command": "c", "versions": {}, "machine": {"gpu": "Some GPU"}, "link": None}
    path.write_text(json.dumps({**json.loads(path.read_text()), "about": about}))
    report = markdown_of(made)
    row = "| [h200-profile-1.3b-torch](../results/h200-profile-1.3b-torch) | torch.profiler | 2 | Some GPU | 0123456 |"
    assert row in report
    assert "Steps traced in each run: 2." in report


def test_violations_are_told(made: Path) -> None:
    path = made / "results" / "h200-profile-1.3b-torch" / "findings.json"
    found = json.loads(path.read_text())
    found["violations"] = [
        {"rule": "x", "rule_text": "the rule", "step": 3, "group": "g", "site": "layers.1/mlp/0", "by_us": 7.0}
    ]
    path.write_text(json.dumps(found))
    assert "- **Violation** (torch.profiler): layers.1/mlp/0, step 3: the rule; by 7.0 µs." in markdown_of(made)
