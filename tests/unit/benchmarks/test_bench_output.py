"""The frontier, the table and the picture."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text
from rich.console import Console

from benchmarks.suites.frontier import frontier
from benchmarks.suites.picture import BASELINES, MANY, OURS, _shown, draw
from benchmarks.suites.progress import line
from benchmarks.suites.runner import Item
from benchmarks.suites.saved_picture import draw_saved
from benchmarks.suites.suite import find_suite, load_suite
from benchmarks.suites.table import frontier_methods, markdown


def row(method: str, step_ms: float | None, peak_gib: float | None, **changed: Any) -> dict[str, Any]:
    good = {
        "suite": "small", "case": "one", "method": method, "outcome": "ok", "is_ours": method.startswith("ours"),
        "machine": {"gpu": "H200", "cores": 4}, "versions": {"torch": "2.11.0", "torchtune": None}, "commit": "c0ffee",
        "command": "python tools/bench.py", "reference": "none", "num_rounds": 2, "step_ms_median": step_ms,
        "step_ms_min": step_ms, "step_ms_max": step_ms, "first_step_ms": 1500.0, "tokens_per_s": 1000.0,
        "model_tflops_per_s": 300.0, "device_peak_gib": peak_gib, "device_static_gib": 10.0,
        "device_reserved_gib": 95.0, "host_peak_gib": 3.0, "losses_equal": True, "loss_max_rel_diff": 0.0,
        "budget_gib": None, "flags": "--seq-length 4096",
    }  # fmt: skip
    return {**good, **changed}


ROWS = [
    row("none", 100.0, 90.0, loss_max_rel_diff=1e-6),
    row("full-recompute", 130.0, 40.0),
    row("recompute-mlp", 120.0, 95.0, losses_equal=False, loss_max_rel_diff=5e-6),
    row("ours-0-3", 101.0, 80.0, losses_equal=False, loss_max_rel_diff=2e-3),
    row("ours-all", 125.0, 40.0),
    row("slow", 900.0, 41.0),
    row("big", None, None, outcome="oom_device", losses_equal=None, num_rounds=0),
]


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([], []),
        ([(1, 1)], [0]),
        ([(3, 1), (1, 3), (2, 2)], [1, 2, 0]),
        ([(3, 1), (1, 3), (2, 4), (3, 0.5)], [1, 3]),
        ([(1, 2), (1, 1), (2, 1)], [1]),
        ([(1, 1), (1, 1)], [0]),
    ],
)
def test_frontier(points: list[tuple[float, float]], best: list[int]) -> None:
    assert frontier(points) == best


def test_the_frontier_of_a_case() -> None:
    assert frontier_methods(ROWS) == {"ours-all", "none"}, "the losses of ours-0-3 are others"
    same = [{**found, "loss_max_rel_diff": 0.0} for found in ROWS]
    assert frontier_methods(same) == {"ours-all", "ours-0-3", "none"}
    assert frontier_methods([row("none", 5.0, None)]) == set(), "no device, no frontier"


def test_the_table() -> None:
    text = markdown(ROWS)
    lines = {text.split(" | ")[0].strip("| *"): text for text in text.splitlines() if text.startswith("| ")}
    assert lines["ours-0-3"] == (
        "| **ours-0-3** | 101.0 (101.0–101.0) | 1.010 | 1.5 | 1000 | 300.0 | 80.00 | 70.00 | 95.00 | 3.00 "
        "| **other losses: 2.0e-03** |  |"
    )
    assert lines["recompute-mlp"].endswith("| 5.0e-06 |  |"), "no more than ten times the noise of none itself"
    assert lines["none"].endswith("| equal | ★ |")
    assert lines["big"].startswith("| big | out of device memory |")
    assert "on H200; torch 2.11.0; commit c0ffee" in text
    assert len({line.count("|") for line in lines.values()}) == 1


def saved(method: str, held_mib: float | None, **changed: Any) -> dict[str, Any]:
    """A row of a suite on the CPU, where saved tensors are counted."""
    return row(method, 5.0, None, **{
        "peak": "saved", "saved_peak_gib": None if held_mib is None else held_mib / 1024, "device_static_gib": None,
        "device_reserved_gib": None, "machine": {"gpu": "none", "cores": 2}, "swapped_out_bytes": None,
        "losses": ["0x1p+1"] * 5, "flags": "--num-layers 4 --hidden-size 64 --seq-length 256", **changed,
    })  # fmt: skip


SAVED = [
    saved("none", 40.0),
    saved("save-on-cpu", None),
    saved("ours-all", 10.0, swapped_out_bytes=3 << 20, budget_gib=12 / 1024),
    saved("ours-0", 39.0, losses_equal=False, loss_max_rel_diff=2e-3),
    saved("big", None, outcome="oom_host", losses=None, losses_equal=None),
]


def test_a_table_of_the_cpu_has_no_times() -> None:
    text = markdown(SAVED)
    assert text.splitlines()[-7:] == [
        "| method | held MiB | of `none` | budget MiB | offloaded MiB | losses | remarks |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| none | 40.0 | 100% |  |  | 5 steps |  |",
        "| save-on-cpu | not counted |  |  |  | equal to the bit |  |",
        "| **ours-all** | 10.0 | 25% | 12.0 | 3.0 | equal to the bit |  |",
        "| **ours-0** | 39.0 | 98% |  |  | **differ by 2.0e-03** |  |",
        "| big |  |  |  |  |  | out of host memory |",
    ]
    assert not re.search(r"\bms\b|tokens/s|FLOP", text)


def test_a_picture_of_the_cpu_has_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plt, "close", lambda figure: None)
    draw_saved([*SAVED, saved("none", 80.0, case="deeper")], tmp_path / "rows.png")
    figure = plt.gcf()
    words = [text.get_text() for panel in figure.axes for text in panel.findobj(Text)]
    assert {"40.0 MiB", "10.0 MiB · losses equal to the bit", "39.0 MiB · OTHER LOSSES", "80.0 MiB"} <= set(words)
    assert "not counted: its own hooks hide the tensors · losses equal to the bit" in words
    assert not [word for word in words if re.search(r"\bms\b|time", word)]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for panel in figure.axes:
        for text in panel.texts:
            assert text.get_window_extent(renderer).x1 <= figure.bbox.x1, text.get_text()
    plt.close("all")
    assert len({panel.get_xlim() for panel in figure.axes}) == 1, "one scale"


def test_the_picture(tmp_path: Path) -> None:
    rows = [*ROWS, *(row(f"baseline-{i}", 100.0 + i, 70.0 + i, case="two") for i in range(12))]
    path = tmp_path / "rows.png"
    draw(rows, path)
    height, width, _ = matplotlib.image.imread(path).shape
    assert width >= 1500
    assert height >= 1800


def test_peers_far_from_everything_are_named_and_not_drawn() -> None:
    assert [shown["method"] for shown in _shown(ROWS)] == [
        "none", "full-recompute", "recompute-mlp", "ours-0-3", "ours-all",
    ]  # fmt: skip
    assert row("ours-all", 900.0, 41.0) in _shown([*ROWS, row("ours-all", 900.0, 41.0)])


def test_among_many_points_the_frontier_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plt, "close", lambda figure: None)
    crowd = [row(f"peer-{i}", 118.0 + i / 100, 60.0 + i / 100) for i in range(MANY)]
    draw([*ROWS[:2], *crowd, row("ours-best", 101.0, 50.0)], tmp_path / "rows.png")
    (panel,) = plt.gcf().axes
    words = [text.get_text() for text in panel.texts]
    assert {"full recompute", "ours-best", "no offload"} <= set(words), "the frontier"
    assert sum(word.startswith("peer-") for word in words) < MANY, "names upon names are left out"
    assert any("the table names every point" in word for word in words)
    renderer = plt.gcf().canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [text.get_window_extent(renderer) for text in panel.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    plt.close("all")


def markers(path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]) -> list[str]:
    """Return the faces of the drawn markers, without those of the legend."""
    faces: list[str] = []
    scatter = Axes.scatter

    def noted(axes: Axes, x: Any, y: Any, **how: Any) -> Any:
        if not isinstance(x, list):
            faces.append(how["facecolor"])
        return scatter(axes, x, y, **how)

    monkeypatch.setattr(Axes, "scatter", noted)
    draw(rows, path)
    return faces


def test_other_losses_are_hollow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert markers(tmp_path / "rows.png", monkeypatch, ROWS[:5]) == [BASELINES, BASELINES, BASELINES, "white", OURS]


def test_a_line_a_run() -> None:
    on_cpu = load_suite(find_suite("quick")).cases[0]
    case = replace(on_cpu, peak="allocated")
    item = Item(case, case.methods[0], 2)
    good = {"outcome": "ok", "step_ms_median": 12.34, "device_peak_gib": None, "host_peak_gib": 0.5}
    assert line(item, good, 6.2) == "L6-h64 none round 2: step 12.3 ms, host 0.50 GiB (6 s)"
    on_gpu = {**good, "device_peak_gib": 9.0}
    assert line(item, on_gpu, 6.2) == "L6-h64 none round 2: step 12.3 ms, peak 9.00 GiB, host 0.50 GiB (6 s)"
    assert line(item, {"outcome": "timeout"}, 60) == "L6-h64 none round 2: timeout (60 s)"
    item, held = Item(on_cpu, case.methods[0], 2), {**good, "saved_peak_gib": 0.5}
    assert line(item, held, 6.2) == "L6-h64 none round 2: autograd holds 512.0 MiB (6 s)"
    assert line(item, {**held, "saved_peak_gib": None}, 6.2) == "L6-h64 none round 2: trains (6 s)"


def test_the_display_writes_lines_where_there_is_no_terminal() -> None:
    from benchmarks.suites.progress import Display

    case = load_suite(find_suite("quick")).cases[0]
    item = Item(case, case.methods[0], 1)
    text = io.StringIO()
    with Display([item], Console(file=text, width=20)) as display:
        display.done(item, {"outcome": "timeout"}, 60)
    assert text.getvalue() == "[1/1] L6-h64 none round 1: timeout (60 s)\n"
