"""The report says what the results say; fabricated results show that it would notice if it did not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proof.bench import losses
from proof.report import compare, overhead, tables
from proof.report.build import HERE, build, check, read_results, render, to_html
from proof.report.build import context as context_of
from proof.report.compare import Faster
from proof.report.flags import means, shape, swapped_layers, swapped_modules, without_swap
from proof.report.pictures import KEYWORD, with_text
from proof.report.profiles import read_profiles
from proof.report.text import Table
from proof.rows import GIB, Row, RowError, write_rows
from proof.trace.analysis import analyse
from proof.trace.reader import read_trace
from proof.trace.report import save
from tests.unit.proof.made_traces import Plan, train

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
SHAPE = (
    "--num-layers 8 --hidden-size 1024 --seq-length 2048 --micro-batch-size 2 --global-batch-size 4 "
    "--swap-host-gib 9 --swap-host-unchecked --train-iters 7"
)
ONLY_NONE = {"forward_ms": 101.0, "first_layer_forward_ms": 1.0, "backward_ms": 200.0}
LINK = {"d2h_gb_s": 50.0, "h2d_gb_s": 50.0}


def a_row(method: str, step_ms: float | None, peak_gib: float | None, more: str = "", **fields: Any) -> Row:
    """A row of a benchmark; without a step time one that ran out of device memory."""
    worked = step_ms is not None
    return {
        "suite": "h200-dense", "case": "small", "method": method, "flags": f"{SHAPE} {more}".strip(),
        "outcome": "ok" if worked else "oom_device", "output_tail": None if worked else "CUDA out of memory",
        "step_ms_median": step_ms, "step_ms_all": [step_ms - 1, step_ms, step_ms + 1] if worked else None,
        "step_ms_min": step_ms - 1 if worked else None, "step_ms_max": step_ms + 1 if worked else None,
        "first_step_ms": 5000.0 if worked else None, "device_peak_gib": peak_gib,
        "device_static_gib": 10.0 if worked else None, "device_reserved_gib": peak_gib,
        "host_peak_gib": 0.5 if worked else None, "tokens_per_s": 8192 / step_ms * 1e3 if worked else None,
        "num_params": 10**9 if worked else None, "loss_hex": "0x1.8p+3" if worked else None,
        "losses_equal": (method == "none") if worked else None, "loss_max_rel_diff": 0.0 if worked else None,
        "reference": "none", "num_rounds": 1, "what": f"What {method} is.", "is_ours": "--swap-layers" in more,
        "env": {}, "wrap": None, "link": LINK, "versions": {"torch": "2.11.0"},
        "machine": {"gpu": "Some GPU", "num_gpus": 1}, "commit": "0123456789", "command": "python tools/bench.py",
        **fields,
    }  # fmt: skip


def ours(method: str, step_ms: float | None, peak_gib: float | None, gib: float, more: str, **fields: Any) -> Row:
    """A swapped row; ``gib``: what leaves in each of its two micro-batches."""
    moved = int(2 * gib * GIB)
    fields = {"swapped_out_bytes": moved, "swapped_in_bytes": moved, "host_peak_gib": gib, "num_late": 0, **fields}
    return a_row(method, step_ms, peak_gib, more, **fields)


RECOMPUTE = "--recompute-granularity selective --recompute-modules mlp"


def suite() -> list[Row]:
    """Two micro-batches a step: 100 ms of forward hide 4.66 GiB; everything is 18 GiB."""
    return [
        a_row("none", 700.0, 40.0, **ONLY_NONE),
        a_row("recompute-mlp", 800.0, 24.0, RECOMPUTE, losses_equal=False, loss_max_rel_diff=1e-3),
        a_row("full-recompute", 900.0, 15.0, "--recompute-granularity full"),
        a_row("slow", 2000.0, 24.0, wrap="proof.bench.peers:save_on_cpu"),
        a_row("dies", None, None),
        a_row("cannot", None, None, outcome="refused", output_tail="Traceback\nAssertionError: not with this"),
        ours("ours-0-1", 701.0, 35.5, 4.5, "--swap-layers 0-1"),
        ours("ours-all", 1200.0, 22.0, 18.0, "--swap-layers all"),
        ours("ours-mlp", 860.0, 18.0, 6.0, f"--swap-layers all {RECOMPUTE}"),
        ours("ours-dies", None, None, 0.0, "--swap-layers 0-2"),
    ]


def names(rows: list[Row]) -> list[str]:
    return [row["method"] for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``docs`` with results of everything that the report has a section for, and the report."""
    folder = tmp_path_factory.mktemp("whole")
    results = folder / "docs" / "results"
    write_rows(results / "h200-dense.jsonl", suite())
    for name in ("h200-overhead", "h200-equality", "h200-two-gpus"):
        shutil.copy(RESULTS / f"{name}.jsonl", results)
    shutil.copy(RESULTS / "literature.toml", results)
    trace, summary = train(Plan(num_steps=2))
    for profiler, kind in (("torch", "kineto"), ("nsys", "nsys")):
        profile = results / f"h200-profile-1.3b-{profiler}"
        profile.mkdir()
        save(analyse(read_trace(trace.write(folder, kind)), summary), profile, None)
    build(results, results.parent)
    return results.parent


@pytest.fixture
def built(whole: Path, tmp_path: Path) -> Path:
    """A copy of one's own."""
    return shutil.copytree(whole, tmp_path / "docs")


@pytest.fixture
def made(built: Path) -> Path:
    """The results alone."""
    for path in (built / "report.md", built / "report.html"):
        path.unlink()
    shutil.rmtree(built / "report")
    return built


def markdown_of(docs: Path) -> str:
    return render(context_of(read_results(docs / "results"), docs)[0])


# ------------------------------------------------------------------------------------------- what is committed


def test_the_committed_report_says_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, "tools/report.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_result_file_is_in_the_index() -> None:
    index = (RESULTS / "README.md").read_text()
    files = [path.name for path in RESULTS.iterdir() if path.name != "README.md"]
    assert [name for name in files if f"`{name}`" not in index and not re.search(_family(name), index)] == []


def _family(name: str) -> str:
    """Folders of traces and what tools/bench.py leaves beside its rows are indexed by pattern."""
    return re.escape("`h200-profile-*`") if "-profile-" in name else re.escape(f"`{Path(name).stem}.*`")


FIGURE = re.compile(r"\d|%|\b(?:twice|half as|double|percent|per cent)\b")


def figures_by_hand(template: str) -> list[str]:
    """Lines that hold a digit, a percentage or a ratio in words, inside of expressions too. ``{% %}`` are marks."""
    lines = template.splitlines()
    return [line for line in lines if FIGURE.search(re.sub(r"\{%|%\}", "", line))]


def test_no_figure_is_typed_into_the_template() -> None:
    assert figures_by_hand((HERE / "report.md.j2").read_text()) == []


@pytest.mark.parametrize("planted", ["It is 1.12x faster.", "costs {{ 3.5 }} ms", "some % slower", "twice as fast"])
def test_a_figure_typed_by_hand_is_caught(planted: str) -> None:
    assert figures_by_hand(f"Fine.\n{planted}\n{{% if x %}}fine{{% endif %}}") == [planted]


# ------------------------------------------------------------------------------------- building and checking


def test_what_is_built_agrees_and_is_read_only_from_results(made: Path) -> None:
    written = {path.relative_to(made).as_posix() for path in build(made / "results", made)}
    assert written == {"report.md", "report.html", "report/h200-dense-small.png", "report/overhead.png"}
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
    assert check(made / "results", made) == [f"{made / 'report.md'} is not there"]


def test_a_stale_picture_is_noticed_and_renewed(built: Path) -> None:
    assert check(built / "results", built) == []
    change(built / "results" / "h200-dense.jsonl", '"step_ms_min": 859.0', '"step_ms_min": 858.0')
    picture = built / "report" / "h200-dense-small.png"
    assert f"{picture} is missing or shows other figures" in check(built / "results", built)
    build(built / "results", built)
    assert check(built / "results", built) == []


def test_the_command_line_exits_non_zero_when_they_disagree(built: Path) -> None:
    command = [sys.executable, "tools/report.py", "--results", str(built / "results"), "--output", str(built)]
    change(built / "report.md", "3.94", "3.95")
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
    assert "Nothing was measured yet" in report
    missing = re.findall(r"\*Not measured yet:\* `(?:python tools/|bash tools/)(\S+(?: --suite \S+| \w+)?)", report)
    suites = ("h200-dense", "h200-long-context", "h200-moe")
    wanted = {"profile.sh", "prove.py overhead", "prove.py equality", "prove.py ranks"}
    wanted |= {f"bench.py --suite {name}" for name in suites}
    assert {name.removesuffix(" --swap-layers") for name in missing} == wanted


def test_earlier_results_are_not_in_the_report(made: Path) -> None:
    rows = [{**row, "case": "long ago"} for row in suite()]
    write_rows(made / "results" / "h200-dense-earlier.jsonl", rows)
    assert "long ago" not in markdown_of(made)


def test_the_page_needs_nothing_else(built: Path) -> None:
    page, report = (built / "report.html").read_text(), (built / "report.md").read_text()
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


# ------------------------------------------------------------------------------------------------ comparisons


def test_the_frontier() -> None:
    assert names(compare.on_frontier(suite())) == ["full-recompute", "ours-mlp", "recompute-mlp", "ours-0-1", "none"]


def test_by_peak_failures_come_last() -> None:
    rows = compare.by_peak(suite())
    assert names(rows)[:3] == ["full-recompute", "ours-mlp", "ours-all"]
    assert names(rows)[3:5] == ["recompute-mlp", "slow"]  # one peak: the faster one first
    assert names(rows)[-3:] == ["dies", "cannot", "ours-dies"]


def test_the_best_peer_of_each_point() -> None:
    found = [(d.ours["method"], d.peer and d.peer["method"], d.faster) for d in compare.duels(suite())]
    assert found == [
        ("ours-mlp", "full-recompute", Faster.OURS),
        ("ours-all", "full-recompute", Faster.PEER),
        ("ours-0-1", "recompute-mlp", Faster.OURS),
    ]
    assert compare.duels(suite())[0].ratio == pytest.approx(900 / 860)


@pytest.mark.parametrize(
    ("peer_peak", "is_within"), [(24.0, True), (24.004, True), (24.006, False), (25.0, False)]
)
def test_same_peak_means_the_same_when_printed(peer_peak: float, is_within: bool) -> None:
    rows = [a_row("peer", 500.0, peer_peak, RECOMPUTE), ours("mine", 400.0, 24.0, 1.0, "--swap-layers all")]
    assert (compare.duels(rows)[0].peer is not None) == is_within


def test_of_equally_fast_peers_the_smaller_counts_then_the_first_name() -> None:
    mine = ours("mine", 400.0, 30.0, 1.0, "--swap-layers all")
    peers = [a_row("c", 500.0, 25.0), a_row("b", 500.0, 24.0), a_row("a", 500.0, 25.0)]
    best = compare.fastest_within([mine, *peers][1:], 30.0)
    assert best is not None
    assert best["method"] == "b"
    best = compare.fastest_within([peers[0], peers[2]], 30.0)
    assert best is not None
    assert best["method"] == "a"


def test_steps_that_overlap_are_not_called_faster() -> None:
    one = a_row("one", 500.0, 20.0)
    assert compare.faster(one, a_row("nearly", 504.9, 20.0)) is Faster.NEITHER  # apart, but by less than noise
    assert compare.faster(one, a_row("slower", 506.0, 20.0)) is Faster.OURS
    assert compare.faster(one, a_row("faster", 494.0, 20.0)) is Faster.PEER
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
    assert [(loss.peer["method"], loss.ours) for loss in found] == [
        ("full-recompute", None), ("recompute-mlp", rows_by_name["ours-mlp"]),
    ]  # fmt: skip
    assert found[0].lowest is not None
    assert found[0].lowest["method"] == "ours-mlp"
    rows = [row for row in suite() if row["method"] != "ours-mlp"]
    worse = compare.losses(rows)[1]
    assert (worse.peer["method"], worse.ours and worse.ours["method"]) == ("recompute-mlp", "ours-all")
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
        "`ours-all` (1200.0 ms). Ours is bound by the link there: for a micro-batch, copies out take 386.5 ms at the "
        "link's full speed where 100.0 ms of forward can hide them, copies in 386.5 ms under 200.0 ms of backward. "
        "Computing again costs less than what the link cannot hide." in bound
    )
    free = [{**row, **({"swapped_out_bytes": GIB, "swapped_in_bytes": GIB} if row["is_ours"] else {})} for row in rows]
    assert "By the arithmetic the link hides all of our copies there" in sentences(free)
    assert "bound by the link" not in sentences(free)
    untimed = [{**row, "forward_ms": None} for row in rows]
    assert "The rows do not say why" in sentences(untimed)
    assert "that alone (`recompute-mlp`) takes 800.0 ms, the rest is what swapping" not in sentences(rows)
    mixed = sentences(suite())
    assert "`ours-mlp` (860.0 ms). Ours recomputes too, and that recomputation alone (`recompute-mlp`)" in mixed
    assert "the lowest, `ours-mlp`, needs 18.00 GiB" in sentences(suite())
    won = [row for row in suite() if row["method"] in ("recompute-mlp", "ours-mlp")]
    won[1]["device_peak_gib"], won[1]["step_ms_median"], won[1]["step_ms_all"] = 20.0, 700.0, [700.0]
    assert "No peer is clearly faster" in sentences(won)


# --------------------------------------------------------------------------------------------------- overhead


def test_a_swapped_run_beside_its_base() -> None:
    steps = overhead.ladder(suite())
    assert [(step.row["method"], step.base["method"]) for step in steps] == [
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
    assert without_swap(row) == without_swap(a_row("y", 1.0, 1.0, RECOMPUTE))
    assert swapped_layers(a_row("none", 1.0, 1.0, "--swap-layers none")) is None
    assert means(row) == {"recomputes"}
    assert means(a_row("z", 1.0, 1.0, wrap="proof.bench.peers:deepspeed_checkpoint")) == {"recomputes", "offloads"}
    with pytest.raises(ValueError, match="h200-dense, small, x: the row's flags have no --num-layers"):
        shape({**row, "flags": "--micro-batch-size 4"})


# ----------------------------------------------------------------------------------------- tables and traces


def test_losses_that_differ_by_more_than_noise_are_bold() -> None:
    row = a_row("x", 1.0, 1.0, losses_equal=False, loss_max_rel_diff=2e-3)
    assert losses.cell(row, 1e-3) == "2.0e-03"
    assert losses.cell(row, 1e-5) == "**differ: 2.0e-03**"
    assert losses.cell({**row, "losses_equal": True}, None) == "equal"
    assert losses.cell(a_row("dies", None, None), None) is None


def test_failed_runs_keep_their_line() -> None:
    lines = {line[0]: line[1] for line in tables.methods_table(suite()).rows}
    assert lines["dies"] == "out of device memory"
    assert lines["cannot"] == "refused by upstream"
    assert lines["**ours-0-1** ★"] == "701.0 (700.0–702.0)"


def test_the_first_run_of_a_case_is_its_reference(made: Path) -> None:
    runs = tables.equal_runs(read_results(made / "results").suites["prove-equality"])
    assert [run.is_reference for run in runs] == [True, False, False] * 2
    assert [run.is_ours for run in runs] == [False, False, True] * 2
    assert all(run.is_equal for run in runs)
    broken = tables.EqualRun({**runs[2].row, "grad_norms_equal": False}, False)
    assert not broken.is_equal
    assert "**differ**" in str(tables.equality_table([broken]))


def test_numbers_stand_to_the_right() -> None:
    table = Table(["a", "b", "c"], [["x", "1.0 (0.5–2.0)", "y"], ["z", "–", "3 × GPU"]])
    assert str(table).splitlines()[1] == "| --- | ---: | --- |"


def test_two_profilers_of_one_run_stand_side_by_side(made: Path) -> None:
    (group,) = read_profiles(made / "results")
    assert group.subject == "1.3b"
    assert [profile.profiler for profile in group.profiles] == ["Nsight Systems", "torch.profiler"]
    assert group.differences == []
    assert "Both profilers see the same" in markdown_of(made)
    path = made / "results" / "h200-profile-1.3b-torch" / "findings.json"
    found = json.loads(path.read_text())
    found["steps"][0]["copies"]["num_out_copies"] += 1
    path.write_text(json.dumps(found))
    assert "**The profilers disagree** on num_out_copies" in markdown_of(made)


def test_violations_are_told(made: Path) -> None:
    path = made / "results" / "h200-profile-1.3b-torch" / "findings.json"
    found = json.loads(path.read_text())
    found["violations"] = [
        {"rule": "x", "rule_text": "the rule", "step": 3, "group": "g", "site": "layers.1/mlp/0", "by_us": 7.0}
    ]
    path.write_text(json.dumps(found))
    assert "- **Violation** (torch.profiler): layers.1/mlp/0, step 3: the rule; by 7.0 µs." in markdown_of(made)
