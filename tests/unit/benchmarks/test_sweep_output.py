"""The picture of a sweep, and its section of the report."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib.image
import matplotlib.pyplot as plt
import pytest

from benchmarks.report.build import build, check
from benchmarks.rows import RowError, read_rows, write_rows
from benchmarks.sweeps import picture
from benchmarks.sweeps.table import short
from tests.unit.benchmarks.made_report import suite
from tests.unit.benchmarks.sweep_cases import FILE, FakeTraining, a_sweep, results_in, search


def made(folder: Path, content: str = FILE, largest: int = 40) -> Path:
    sweep = a_sweep(folder, content)
    search(sweep, results_in(sweep, folder), FakeTraining(lambda trial: trial.value.number <= largest))
    return folder / "rows.jsonl"


def test_the_picture_has_no_words_upon_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = read_rows(made(tmp_path))
    monkeypatch.setattr(plt, "close", lambda figure: None)
    picture.draw(rows, tmp_path / "rows.png")
    figure = plt.gcf()
    (panel,) = figure.axes
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    words = [*panel.texts, *panel.get_yticklabels(), *panel.get_xticklabels(), panel.title, panel.xaxis.label]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in words if text.get_text()]
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (one, other)
    for name, box in boxes:
        assert figure.bbox.x0 <= box.x0, name
        assert box.x1 <= figure.bbox.x1, name
    assert any("next, 28 layers" in name or "30 layers" in name for name, _ in boxes)
    assert any("physical limit" in name for name, _ in boxes)
    plt.close("all")
    assert matplotlib.image.imread(tmp_path / "rows.png").shape[0] > 300


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (19_994_362_880, "20.0 B"), (8_580_000_000, "8.58 B"), (125e9, "125 B"), (999_600_000, "1.00 B"),
        (999_400_000, "999 M"), (124_400_000, "124 M"), (5_000_000, "5.00 M"),
    ],
)  # fmt: skip
def test_a_number_of_parameters_has_three_digits(params: float, text: str) -> None:
    assert short(params) == text


def test_a_picture_of_sequences_has_no_limit(tmp_path: Path) -> None:
    content = FILE.replace('"depth"', '"sequence"').replace("first = 16\nlast = 80\nstep = 2", "values = [1024, 2048]")
    content = content.replace("--seq-length 4096", "--num-layers 8")
    path = made(tmp_path, content, largest=1024)
    picture.draw(read_rows(path), tmp_path / "rows.png")
    assert (tmp_path / "rows.png").exists()


def test_the_report_has_a_section(tmp_path: Path) -> None:
    results = tmp_path / "docs" / "results"
    results.mkdir(parents=True)
    write_rows(results / "h200-dense.jsonl", suite())
    build(results, results.parent)
    page = results.parent / "benchmarks" / "appendix.md"
    assert "*Not measured yet:* `python tools/sweep.py --sweep h200-depth" in page.read_text()

    made(tmp_path).rename(results / "small-sweep.jsonl")
    assert check(results, results.parent)
    build(results, results.parent)
    text = page.read_text()
    assert "### Sweep small: largest depth" in text
    assert "(small-sweep.png)" in text
    assert "| none | 28 layers |" in text
    assert "| **ours** | 40 layers |" in text
    assert "The physical limit of this machine" in text
    assert "tools/bench.py --suite small" not in text, "a sweep is no suite"
    assert check(results, results.parent) == []

    path = results / "small-sweep.jsonl"
    path.write_text(path.read_text().replace('"unit": "layers"', '"unit": 3'))
    with pytest.raises(RowError, match="'unit' is 3"):
        check(results, results.parent)
