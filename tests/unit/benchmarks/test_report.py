"""The report matches the results; fabricated results show that the check notices differences."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.pictures import digest_of
from benchmarks.report.build import APPENDIX, BRIEF, HERE, build, check
from benchmarks.rows import write_rows
from benchmarks.traces.analysis import analyse
from benchmarks.traces.reader import read_trace
from benchmarks.traces.report import save
from tests.unit.benchmarks.made_report import RESULTS, ROOT, markdown_of, suite
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


@pytest.mark.slow
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
        ("h200-profile-1.3b-nsys/findings.json", '"num_copied_out": ', '"num_copied_out": 9', "9"),
        ("literature.toml", "vDNN", "wDNN", "wDNN"),
    ],
)
def test_a_changed_figure_is_noticed(built: Path, file: str, old: str, new: str, said: str) -> None:
    change(built / "results" / file, old, new)
    differences = check(built / "results", built)
    assert any(line.startswith("+") and said in line for line in differences), differences


def test_a_stale_picture_is_noticed_and_renewed(built: Path) -> None:
    change(built / "results" / "h200-dense.jsonl", '"step_ms_min": 859.0', '"step_ms_min": 858.0')
    picture = built / "benchmarks" / "h200-dense-small.png"
    assert f"{picture} is missing or shows other figures" in check(built / "results", built)
    build(built / "results", built)
    assert check(built / "results", built) == []
    picture.write_bytes(picture.read_bytes()[:-100])
    assert digest_of(picture) is None, "half a picture"


def test_what_a_trace_says(built: Path) -> None:
    page, path = markdown_of(built), built / "results" / TRACED
    assert "Both profilers agree on" in page
    findings = json.loads(path.read_text())
    findings["steps"][0]["copies"]["num_out_copies"] += 1
    one = {"rule": "x", "rule_text": "the rule", "step": 3, "group": "g", "site": "layers.1/mlp/0", "by_us": 7.0}
    path.write_text(json.dumps({**findings, "violations": [one], "emulated": True}))
    page = markdown_of(built)
    assert "**The profilers disagree** on num_out_copies" in page
    assert "- **Violation** (torch.profiler, emulated device): layers.1/mlp/0, step 3: the rule; by 7.0 µs." in page
    assert "times and shares of time mean nothing" in page
