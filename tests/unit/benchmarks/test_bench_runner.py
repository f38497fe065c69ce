"""The order of runs, concurrent processes, stored runs, and merging rounds into rows. No trainer runs here."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import read_rows
from benchmarks.runner.launch import Finished
from benchmarks.runner.request import Request
from benchmarks.store import StoreError
from benchmarks.suites import runner
from benchmarks.suites.results import SuiteResults, losses_against, merge
from benchmarks.suites.runner import Item, measure, undisturbed
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
FACTS = {"versions": {"torch": "2"}, "machine": {"gpu": "x"}, "commit": "c0ffee", "link": None}


def result(step_ms: float = 10.0, **changed: Any) -> dict[str, Any]:
    measured = {
        "step_ms_all": [step_ms, step_ms + 2], "step_ms_median": step_ms + 1, "first_step_ms": 100.0, "build_ms": 50.0,
        "tokens_per_step": 1000, "step_flops": 11 * 10**9, "num_params": 7, "losses": ["0x1p+1", "0x1p+0"],
        "device_peak_gib": 5.0, "device_reserved_gib": 6.0, "device_static_gib": 2.0, "host_peak_gib": 1.0,
        "host_rss_growth_gib": 1.0, "host_pinned_gib": 0.0,
    }  # fmt: skip
    return {**measured, **changed}


class FakeChild:
    """A fake process: it becomes quiet after three looks, ends after ten polls, and records all events."""

    log: list[str] = []  # noqa: RUF012
    outcomes: dict[str, str] = {}  # noqa: RUF012
    interrupt_at = ""

    def __init__(self, request: Request, *, on_gpu: bool) -> None:
        assert on_gpu
        self.request = request
        self._looks = 0
        self.name = next((n for n in ("swap-layers", "recompute") if f"--{n}" in " ".join(request.flags)), "none")
        self._note("start")

    def _note(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")

    def __enter__(self) -> FakeChild:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def is_quiet(self) -> bool:
        self._looks += 1
        if self._looks == 3:
            self._note("quiet")
        return self._looks >= 3

    def say(self, word: str) -> None:
        self._note(word)

    def finish(self, timeout_s: float, host_limit_gib: float | None, on_poll: Callable[[], None]) -> Finished:
        if self.name == self.interrupt_at:
            raise KeyboardInterrupt
        for _ in range(10):
            on_poll()
        outcome = self.outcomes.get(self.name, "ok")
        return Finished(outcome, result() if outcome == "ok" else {}, "" if outcome == "ok" else "its last words")

    def close(self) -> None:
        self._note("close")


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suite:
    path = tmp_path / "small.toml"
    path.write_text(SUITE)
    FakeChild.log, FakeChild.outcomes, FakeChild.interrupt_at = [], {}, ""
    monkeypatch.setattr(runner, "Child", FakeChild)
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    return load_suite(path)


def results_in(suite: Suite, tmp_path: Path, *, resume: bool = False, **facts: Any) -> SuiteResults:
    return SuiteResults(suite, tmp_path / "rows.jsonl", {**FACTS, **facts}, "python tools/bench.py", resume=resume)


def done_into(labels: list[str]) -> Callable[[Item, dict[str, Any], float], None]:
    return lambda item, run, seconds: labels.append(f"{item.method.name} {item.number} {run['outcome']}")


def test_methods_alternate_and_a_missing_package_is_told_once(suite: Suite, tmp_path: Path) -> None:
    labels: list[str] = []
    results = results_in(suite, tmp_path)
    assert measure(suite, results, time_limit_s=None, on_done=done_into(labels))
    assert labels == [
        "none 1 ok", "full 1 ok", "tune 1 missing: torchtune", "ours 1 ok", "none 2 ok", "full 2 ok", "ours 2 ok",
    ]  # fmt: skip
    outcomes = {row["method"]: (row["outcome"], row["num_rounds"]) for row in read_rows(tmp_path / "rows.jsonl")}
    assert outcomes == {"none": ("ok", 2), "full": ("ok", 2), "tune": ("missing: torchtune", 0), "ours": ("ok", 2)}


def test_nothing_imports_while_steps_are_timed(suite: Suite, tmp_path: Path) -> None:
    measure(suite, results_in(suite, tmp_path), time_limit_s=None, on_done=done_into([]))
    log = FakeChild.log
    assert log[:7] == [
        "start none", "go none", "start recompute", "quiet recompute", "time none", "close none", "go recompute",
    ]  # fmt: skip
    for index, event in enumerate(log):
        if event.startswith("time"):
            started = sum(e.startswith("start") for e in log[:index])
            gone = sum(e.startswith("go") for e in log[:index])
            quiet = sum(e.startswith("quiet") for e in log[:index])
            assert started - gone == (1 if index < len(log) - 2 else 0), "only one process waits"
            assert quiet == started - 1, "all but the very first, which runs already, have been seen quiet"
    assert sum(e.startswith("start") for e in log) == sum(e.startswith("close") for e in log) == 6


def test_what_has_failed_is_not_run_again(suite: Suite, tmp_path: Path) -> None:
    FakeChild.outcomes = {"recompute": "oom_device"}
    labels: list[str] = []
    measure(suite, results_in(suite, tmp_path), time_limit_s=None, on_done=done_into(labels))
    assert [label for label in labels if label.startswith("full")] == ["full 1 oom_device"]
    row = next(row for row in read_rows(tmp_path / "rows.jsonl") if row["method"] == "full")
    assert row["output_tail"] == "its last words"
    assert row["step_ms_median"] is None


def test_an_interruption_keeps_what_is_done_and_resume_does_the_rest(suite: Suite, tmp_path: Path) -> None:
    FakeChild.interrupt_at = "swap-layers"
    labels: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        measure(suite, results_in(suite, tmp_path), time_limit_s=None, on_done=done_into(labels))
    assert sum(e.startswith("start") for e in FakeChild.log) == sum(e.startswith("close") for e in FakeChild.log)
    FakeChild.interrupt_at = ""
    resumed: list[str] = []
    faster = {"d2h_gb_s": 60.0, "h2d_gb_s": 61.0}
    measure(suite, results_in(suite, tmp_path, resume=True, link=faster), time_limit_s=None, on_done=done_into(resumed))
    assert labels == ["none 1 ok", "full 1 ok", "tune 1 missing: torchtune"]
    assert resumed == ["ours 1 ok", "none 2 ok", "full 2 ok", "ours 2 ok"]
    links = {row["method"]: [run["link"] for run in row["rounds"]] for row in read_rows(tmp_path / "rows.jsonl")}
    assert links["none"] == [FACTS["link"], faster], "each run has that of the machine that it ran on"
    assert links["ours"] == [faster, faster]
    again: list[str] = []
    measure(suite, results_in(suite, tmp_path, resume=True), time_limit_s=None, on_done=done_into(again))
    assert again == []


def test_time_is_up_between_two_runs(suite: Suite, tmp_path: Path) -> None:
    assert not measure(suite, results_in(suite, tmp_path), time_limit_s=-1.0, on_done=done_into([]))
    assert FakeChild.log == []


def test_a_part_now_and_a_part_later_in_the_suites_order(suite: Suite, tmp_path: Path) -> None:
    for name in ("ours", "none"):
        chosen = suite.chosen([], [name], 1)
        measure(chosen, results_in(suite, tmp_path, resume=True), time_limit_s=None, on_done=done_into([]))
    rows = read_rows(tmp_path / "rows.jsonl")
    assert [(row["method"], row["reference"]) for row in rows] == [("none", "none"), ("ours", "none")]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"commit": "other"}, "has commit 'c0ffee' for one none, this run has 'other'"),
        ({"machine": {"gpu": "y"}}, "has machine"),
    ],
)
def test_only_what_is_comparable_is_resumed(suite: Suite, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    measure(suite, results_in(suite, tmp_path), time_limit_s=None, on_done=done_into([]))
    with pytest.raises(StoreError, match=said):
        results_in(suite, tmp_path, resume=True, **changed)
    with pytest.raises(StoreError, match="exists: continue it with --resume"):
        results_in(suite, tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SUITE.replace("--num-layers 4", "--num-layers 5"))
    with pytest.raises(StoreError, match=r"has flags '.*--num-layers 4"):
        results_in(load_suite(path), tmp_path, resume=True)


def test_rounds_become_a_row() -> None:
    runs = [
        {"round": 1, "outcome": "ok", "command": "a", **result(10.0, device_peak_gib=5.0, first_step_ms=100.0)},
        {"round": 2, "outcome": "ok", "command": "b", **result(20.0, device_peak_gib=5.5, first_step_ms=300.0)},
    ]
    row = merge(runs, runs)
    assert row["step_ms_all"] == [10.0, 12.0, 20.0, 22.0]
    assert row["step_ms_median"] == 16.0
    assert (row["step_ms_min"], row["step_ms_max"], row["step_ms_rounds"]) == (10.0, 22.0, [11.0, 21.0])
    assert (row["device_peak_gib"], row["first_step_ms"]) == (5.5, 200.0)
    assert row["tokens_per_s"] == pytest.approx(1000 / 0.016)
    assert row["model_tflops_per_s"] == pytest.approx(11e9 / 0.016 / 1e12)
    assert row["losses_equal"] is True
    assert (row["num_rounds"], row["command"], row["loss_hex"]) == (2, "b", "0x1p+0")
    json.dumps(row)


def test_a_round_that_failed_makes_the_outcome_and_the_others_stay() -> None:
    runs = [
        {"round": 1, "outcome": "ok", "command": "a", **result()},
        {"round": 2, "outcome": "timeout", "command": "a", "output_tail": "words"},
    ]
    row = merge(runs, runs)
    assert (row["outcome"], row["output_tail"]) == ("timeout", "words")
    assert (row["step_ms_median"], row["num_rounds"]) == (11.0, 1)


def test_losses_are_compared_round_by_round() -> None:
    def run(number: int, *losses: float) -> dict[str, Any]:
        return {"round": number, "outcome": "ok", "losses": [loss.hex() for loss in losses]}

    reference = [run(1, 4.0, 2.0), run(2, 4.0, 2.5)]
    assert losses_against([run(1, 4.0, 2.0), run(2, 4.0, 2.5)], reference) == {
        "losses_equal": True, "loss_max_rel_diff": 0.0,
    }  # fmt: skip
    other = losses_against([run(1, 4.0, 2.0), run(2, 4.0, 2.0)], reference)
    assert other == {"losses_equal": False, "loss_max_rel_diff": pytest.approx(0.2)}
    assert losses_against(reference, reference)["loss_max_rel_diff"] == pytest.approx(0.25), "its own noise"
    assert losses_against([run(1, 4.0)], None) == {"losses_equal": None, "loss_max_rel_diff": None}
    stopped_early = losses_against([run(1, 4.0)], reference)
    assert stopped_early == {"losses_equal": True, "loss_max_rel_diff": 0.0}, "compared is what both have"
    with_nan = losses_against([run(1, float("nan"), 2.0)], reference)
    assert with_nan["losses_equal"] is False
    assert with_nan["loss_max_rel_diff"] == float("inf")


def test_without_none_the_first_that_works_is_compared_with(suite: Suite, tmp_path: Path) -> None:
    FakeChild.outcomes = {"none": "oom_device"}
    measure(suite, results_in(suite, tmp_path), time_limit_s=None, on_done=done_into([]))
    rows = {row["method"]: row for row in read_rows(tmp_path / "rows.jsonl")}
    assert {row["reference"] for row in rows.values()} == {"full"}
    assert rows["ours"]["losses_equal"] is True
    assert rows["none"]["losses_equal"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_what_was_started_is_known(number: signal.Signals) -> None:
    class Ended(Exception):
        pass

    def end(number: int, frame: object) -> None:
        raise Ended

    started: list[str] = []

    def start() -> None:
        with undisturbed():
            signal.raise_signal(number)
            started.append("known")

    before = signal.signal(number, end)
    try:
        with pytest.raises(Ended):
            start()
        assert started == ["known"]
        assert signal.getsignal(number) is end
        with pytest.raises(Ended):
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
