"""A folder of fabricated results, and the report built from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.report.build import build
from benchmarks.rows import write_rows
from benchmarks.traces.analysis import analyse
from benchmarks.traces.reader import read_trace
from benchmarks.traces.report import save
from tests.unit.benchmarks.made_report import (
    RESULTS,
    suite,
)
from tests.unit.benchmarks.made_traces import Plan, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder ``docs`` with results for every section of the report, and the report."""
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
    """A copy of the folder that the test may change."""
    return shutil.copytree(whole, tmp_path / "docs")


@pytest.fixture
def made(built: Path) -> Path:
    """The results alone."""
    (built / "benchmarks.md").unlink()
    shutil.rmtree(built / "benchmarks")
    return built
