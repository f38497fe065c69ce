"""Grids of runs: their order, concurrent processes, stored and resumed runs, rounds merged into rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import read_rows
from benchmarks.runner import grid
from benchmarks.runner.grid import measure
from benchmarks.runner.launch import Finished
from benchmarks.runner.request import Request
from benchmarks.store import StoreError
from benchmarks.suites import suite as suites
from benchmarks.suites.results import SuiteResults, losses_against, merge
from benchmarks.suites.suite import Suite, load_suite

SUITE = """
description = "x"
device = "gpu"
warm_up = 2
timed = 2
rounds = 2
time_limit_s = 60
flags = "--transformer-impl local --micro-batch-size 1"
[cases.one]
flags = "--num-layers 4"
micro_batches = 1
[methods]
none = "none"
full = "full-recompute"
tune = "torchtune-offload"
ours = "ours --swap-layers all"
"""
PLANNED = SUITE.replace('ours = "ours --swap-layers all"', """
auto = "ours --swap-memory-gib static+50%"
planned = "ours --swap-plan plans/one.json"
""").replace('tune = "torchtune-offload"', "").replace("rounds = 2", "rounds = 1")  # fmt: skip
FACTS = {"versions": {"torch": "2"}, "machine": {"gpu": "x"}, "commit": "c0ffee", "link": None}
STAGE = {"stage": "stable", "first_step": 9, "last_step": 15, "note": "settled", "predicted_peak_gib": 3.9}
PLANNING = {
    "budget_gib": 4.0, "predicted_peak_gib": 3.9, "predicted_step_ms": 10.5, "profile_sha256": "beef",
    "num_replans": 1, "stages": [STAGE],
}  # fmt: skip


def result(step_ms: float = 10.0, **changed: Any) -> dict[str, Any]:
    measured = {
        "step_ms_all": [step_ms, step_ms + 2], "step_ms_median": step_ms + 1, "first_step_ms": 100.0, "build_ms": 50.0,
        "tokens_per_step": 1000, "step_flops": 11 * 10**9, "num_params": 7, "losses": ["0x1p+1", "0x1p+0"],
        "device_peak_gib": 5.0, "device_reserved_gib": 6.0, "device_static_gib": 2.0, "host_peak_gib": 1.0,
    }  # fmt: skip
    return {**measured, **changed}


class FakeChild:
    """A fake process: it becomes quiet after three looks, ends after ten polls, and records all events."""

    log: list[str] = []  # noqa: RUF012
    outcomes: dict[str, str] = {}  # noqa: RUF012
    def __init__(self, request: Request, *, on_gpu: bool) -> None:
        assert on_gpu
        self.request = request
        self._looks = 0
        self.name = next((n for n in ("swap-layers", "recompute") if f"--{n}" in " ".join(request.flags)), "none")
        self._note("start")

    def _note(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")

    def is_quiet(self) -> bool:
        self._looks += 1
        if self._looks == 3:
            self._note("quiet")
        return self._looks >= 3

    def say(self, word: str) -> None:
        self._note(word)

    def finish(self, timeout_s: float, host_limit_gib: float | None, on_poll: Callable[[], None]) -> Finished:
        for _ in range(10):
            on_poll()
        outcome = self.outcomes.get(self.name, "ok")
        if outcome != "ok":
            return Finished(outcome, {}, "its last words")
        is_planned = any(flag in self.request.flags for flag in ("--swap-memory-gib", "--swap-plan"))
        return Finished("ok", result(**({"planning": PLANNING} if is_planned else {})), "")

    def close(self) -> None:
        self._note("close")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    FakeChild.log, FakeChild.outcomes = [], {}
    monkeypatch.setattr(grid, "Child", FakeChild)
    monkeypatch.setattr(grid.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "one.json").write_text("{}")
    return tmp_path


def load(folder: Path, text: str = SUITE) -> Suite:
    path = folder / "small.toml"
    path.write_text(text)
    return load_suite(str(path))


def results_in(suite: Suite, folder: Path, chosen: Suite | None = None, **facts: Any) -> SuiteResults:
    path = folder / "rows.jsonl"
    return SuiteResults(suite, chosen or suite, path, {**FACTS, **facts}, "tools/bench.py", resume=path.exists())


def run(results: SuiteResults, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Make the open runs and return method, round and outcome of each."""
    capsys.readouterr()
    assert measure(results, None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    return [line.split(" one ")[1].partition(" (")[0].partition(", peak")[0] for line in lines]


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in read_rows(folder / "rows.jsonl")}


def test_methods_take_turns_and_a_missing_package_is_told_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(results_in(load(folder), folder), capsys)
    assert found == [
        "none round 1: step 11.0 ms", "full round 1: step 11.0 ms", "tune round 1: missing: torchtune",
        "ours round 1: step 11.0 ms", "none round 2: step 11.0 ms", "full round 2: step 11.0 ms",
        "ours round 2: step 11.0 ms",
    ]  # fmt: skip
    outcomes = {name: (row["outcome"], row["num_rounds"]) for name, row in rows_of(folder).items()}
    assert outcomes == {"none": ("ok", 2), "full": ("ok", 2), "tune": ("missing: torchtune", 0), "ours": ("ok", 2)}


def test_nothing_imports_while_steps_are_timed(folder: Path) -> None:
    measure(results_in(load(folder), folder), None)
    log = FakeChild.log
    assert log[:7] == [
        "start none", "go none", "start recompute", "quiet recompute", "time none", "close none", "go recompute",
    ]  # fmt: skip
    for index, event in enumerate(log):
        if event.startswith("time"):
            started, gone, quiet = (sum(e.startswith(what) for e in log[:index]) for what in ("start", "go", "quiet"))
            assert started - gone == (1 if index < len(log) - 2 else 0), "only one process waits"
            assert quiet == started - 1, "all but the very first, which runs already, have been seen quiet"
    assert sum(e.startswith("start") for e in log) == sum(e.startswith("close") for e in log) == 6


def test_what_has_failed_is_not_run_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeChild.outcomes = {"recompute": "oom_device", "none": "oom_device"}
    found = run(results_in(load(folder), folder), capsys)
    assert [line for line in found if line.startswith("full")] == ["full round 1: oom_device"]
    rows = rows_of(folder)
    assert (rows["full"]["output_tail"], rows["full"]["step_ms_median"]) == ("its last words", None)
    assert {row["reference"] for row in rows.values()} == {"ours"}, "the first that works"


def test_only_what_is_comparable_is_resumed(folder: Path) -> None:
    measure(results_in(load(folder), folder), None)
    with pytest.raises(StoreError, match="has commit 'c0ffee' for one none, this run has 'other'"):
        results_in(load(folder), folder, commit="other")
    with pytest.raises(StoreError, match=r"has flags '.*--num-layers 4"):
        results_in(load(folder, SUITE.replace("--num-layers 4", "--num-layers 5")), folder)


def test_budgets_come_from_the_unswapped_run(folder: Path) -> None:
    measure(results_in(load(folder, PLANNED), folder), None)
    rows = rows_of(folder)
    assert [row["outcome"] for row in rows.values()] == ["ok"] * 4
    # The unswapped run had 2 GiB of its peak of 5 before any activation.
    assert rows["auto"]["flags"].endswith("--swap-memory-gib 3.500000")
    for name in ("auto", "planned"):
        assert {field: rows[name][field] for field in PLANNING} == PLANNING
    assert (rows["none"]["budget_gib"], rows["full"]["num_replans"]) == (None, None)


def test_what_is_not_ready_is_told_and_run_when_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = load(folder, PLANNED)
    (folder / "plans" / "one.json").unlink()
    chosen = suite.chosen([], ["auto", "planned"], None)
    assert run(results_in(suite, folder, chosen), capsys) == [
        "auto round 1: not ready", "planned round 1: not ready"
    ]  # fmt: skip
    rows = rows_of(folder)
    assert "is relative to the method 'none'" in rows["auto"]["output_tail"]
    assert "plans/one.json is not there. A prediction is committed before" in rows["planned"]["output_tail"]
    assert rows["auto"]["flags"].endswith("static+50%")
    (folder / "plans" / "one.json").write_text("{}")
    assert len(run(results_in(suite, folder), capsys)) == 4
    assert rows_of(folder)["auto"]["flags"].endswith("--swap-memory-gib 3.500000")


def test_rounds_become_a_row() -> None:
    runs = [
        {"round": 1, "outcome": "ok", "command": "a", **result(first_step_ms=100.0), "planning": {**PLANNING}},
        {"round": 2, "outcome": "ok", "command": "b", **result(20.0, device_peak_gib=5.5, first_step_ms=300.0),
         "planning": {**PLANNING, "predicted_peak_gib": 1.0, "num_replans": 7}},
    ]  # fmt: skip
    row = merge(runs, runs)
    assert (row["step_ms_all"], row["step_ms_median"]) == ([10.0, 12.0, 20.0, 22.0], 16.0)
    assert (row["device_peak_gib"], row["first_step_ms"], row["losses_equal"]) == (5.5, 200.0, True)
    assert row["tokens_per_s"] == pytest.approx(1000 / 0.016)
    assert row["model_tflops_per_s"] == pytest.approx(11e9 / 0.016 / 1e12)
    assert (row["predicted_peak_gib"], row["num_replans"]) == (3.9, 7)
    runs[1] = {"round": 2, "outcome": "timeout", "command": "a", "output_tail": "words"}
    row = merge(runs, runs)
    fields = ("outcome", "output_tail", "step_ms_median", "num_rounds")
    assert [row[field] for field in fields] == ["timeout", "words", 11.0, 1]


def test_losses_are_compared_round_by_round() -> None:
    def run(number: int, *losses: float) -> dict[str, Any]:
        return {"round": number, "outcome": "ok", "losses": [loss.hex() for loss in losses]}

    reference = [run(1, 4.0, 2.0), run(2, 4.0, 2.5)]
    for runs, equal, difference in (
        ([run(1, 4.0, 2.0), run(2, 4.0, 2.5)], True, 0.0),
        ([run(1, 4.0, 2.0), run(2, 4.0, 2.0)], False, 0.2),
        (reference, False, 0.25),  # its own noise
        ([run(1, 4.0)], True, 0.0),  # compared is what both have
        ([run(1, float("nan"), 2.0)], False, float("inf")),
    ):
        found = losses_against(runs, reference)
        assert found == {"losses_equal": equal, "loss_max_rel_diff": pytest.approx(difference)}
    assert losses_against([run(1, 4.0)], None) == {"losses_equal": None, "loss_max_rel_diff": None}
