"""Suites with budgets: relative budgets, warm-up of methods that search for a plan, runs that are not ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import read_rows
from benchmarks.runner.launch import Finished
from benchmarks.runner.request import Request
from benchmarks.store import StoreError
from benchmarks.suites import runner
from benchmarks.suites import suite as suites
from benchmarks.suites.budgets import Memory, NotReady, resolved
from benchmarks.suites.methods import MethodError, parse_method
from benchmarks.suites.results import SuiteResults, merge
from benchmarks.suites.runner import measure
from benchmarks.suites.suite import Case, Suite, SuiteError, find_suite, load_suite
from benchmarks.suites.table import markdown
from tests.unit.benchmarks.test_bench_runner import FACTS, FakeChild, done_into, result

SUITE = """
description = "x"
device = "gpu"
peak = "reserved"
warm_up = 2
warm_up_auto = 12
timed = 3
timed_limit_s = 9
rounds = 1
time_limit_s = 60
flags = "--transformer-impl local --micro-batch-size 1 --seq-length 64"
[env]
MINE = "yes"
[cases.one]
flags = "--num-layers 4"
micro_batches = 1
[methods]
none = "none"
full = "full-recompute"
auto-2 = "ours --swap-memory-gib static+2"
"auto-50%" = "ours --swap-memory-gib static+50%"
planned = "ours --swap-plan plans/one.json"
"""
PLANNING = {
    "budget_gib": 4.0, "predicted_peak_gib": 3.9, "predicted_step_ms": 10.5, "profile_sha256": "beef",
    "num_replans": 1, "stages": [{"stage": "stable", "first_step": 9, "last_step": 15, "note": "settled",
                                     "predicted_peak_gib": 3.9}],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with plans; ``planned`` has one."""
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "one.json").write_text("{}")
    return tmp_path


def load(folder: Path, text: str = SUITE) -> Suite:
    path = folder / "small.toml"
    path.write_text(text)
    return load_suite(path)


def request_of(case: Case, name: str, memory: Memory | None = None) -> Request:
    return case.request(next(method for method in case.methods if method.name == name), memory)


# --------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("word", "gib"),
    [("static+24", "82.773755"), ("static+9.5", "68.273755"), ("static+60%", "79.977162"), ("static+0", "58.773755")],
)
def test_a_budget_is_rounded_down_to_a_number(word: str, gib: str) -> None:
    memory = Memory(static_gib=58.77375555, activations_gib=35.3390119)
    flags = ("--lr", "1", "--swap-memory-gib", word)
    assert resolved(flags, memory, "none") == ("--lr", "1", "--swap-memory-gib", gib)
    assert float(gib) <= 58.77375555 + (35.3390119 * 0.6 if "%" in word else float(word.split("+")[1]))


def test_a_number_needs_no_reference() -> None:
    assert resolved(("--swap-memory-gib", "80"), None, "none") == ("--swap-memory-gib", "80")
    with pytest.raises(NotReady, match=r"static\+24 is relative to the method 'none' .* not measured: run it first"):
        resolved(("--swap-memory-gib", "static+24"), None, "none")


@pytest.mark.parametrize("word", ["static", "static+", "static-3", "static+6O%", "static+24GiB"])
def test_a_budget_that_is_none_is_told_when_the_suite_is_read(word: str) -> None:
    with pytest.raises(MethodError, match=r"'auto': --swap-memory-gib .*a number of GiB is expected, or 'static\+24'"):
        parse_method("auto", f"ours --swap-memory-gib {word}", num_layers=4, has_te=False, on_gpu=True)


@pytest.mark.parametrize(
    ("text", "searches", "plan"),
    [
        ("ours --swap-memory-gib static+1", True, None),
        ("ours --swap-memory-fraction 0.9", True, None),
        ("ours --swap-policy auto", True, None),
        ("ours --swap-plan x.json", False, "x.json"),
        ("ours --swap-layers all", False, None),
    ],
)
def test_ways_to_say_what_is_swapped(text: str, searches: bool, plan: str | None) -> None:
    method = parse_method("m", text, num_layers=4, has_te=False, on_gpu=True)
    assert (method.is_ours, method.searches, method.plan_file) == (True, searches, plan)


# ---------------------------------------------------------------------------------------------------- suites


def test_automatic_methods_are_timed_after_their_search(folder: Path) -> None:
    (case,) = load(folder).cases
    memory = Memory(2.0, 4.0)
    assert case.num_steps == 15
    none, full = request_of(case, "none"), request_of(case, "full")
    auto, planned = request_of(case, "auto-2", memory), request_of(case, "planned")
    assert all("--train-iters 15" in " ".join(request.flags) for request in (none, full, auto, planned))
    assert (auto.num_warm_up, auto.num_timed, auto.timed_limit_s, auto.observes) == (12, None, 9, False)
    assert (full.num_warm_up, full.num_timed, full.timed_limit_s, full.observes) == (2, 3, 9, False)
    assert (none.num_warm_up, none.num_timed, none.timed_limit_s) == (2, None, None), "as far as the longest"
    assert (planned.num_warm_up, planned.num_timed, planned.timed_limit_s) == (2, 3, 9)
    assert {request.env["MINE"] for request in (none, full, auto, planned)} == {"yes"}
    (chosen,) = load(folder).chosen([], ["none", "full"], None).cases
    assert request_of(chosen, "full") == full, "a choice of methods changes none of them"


def test_without_automatic_methods_all_are_as_before(folder: Path) -> None:
    text = SUITE[: SUITE.index("auto-2")]
    (case,) = load(folder, text).cases
    for name in ("none", "full"):
        request = request_of(case, name)
        assert request.flags[-2:] == ("--train-iters", "5") or "--train-iters 5 " in " ".join(request.flags)
        assert (request.num_timed, request.timed_limit_s) == (None, 9)


def test_where_the_peak_is_what_autograd_held_that_is_counted(folder: Path) -> None:
    (case,) = load(folder, SUITE.replace('"reserved"', '"saved"')).cases
    assert request_of(case, "full").observes


def test_lengths_change_in_every_method_and_not_while_timed(folder: Path) -> None:
    changed = SUITE.replace("--num-layers 4\"\n", '--num-layers 4"\nsequence_schedule = [[10, 64], [20, 32]]\n')
    with pytest.raises(SuiteError, match=r"\[one\]: steps 3 to 15 are timed and have sequences of several lengths"):
        load(folder, changed)
    (case,) = load(folder, changed.replace("warm_up = 2", "warm_up = 10")).cases
    assert request_of(case, "full").sequence_schedule == ((10, 64), (20, 32))
    assert request_of(case, "auto-2", Memory(1.0, 1.0)).sequence_schedule == ((10, 64), (20, 32))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('peak = "reserved"', 'peak = "highest"', "peak = 'highest'; allowed: allocated, reserved, saved"),
        ('MINE = "yes"', "MINE = 1", r"\[env\]: MINE = 1; expected: str"),
        ("warm_up_auto = 12", "warm_up_auto = 1", "warm_up_auto = 1; at least 2"),
        ("micro_batches", "sequence_schedule = [[0, 32]]\nmicro_batches", r"sequence_schedule has \[0, 32\]"),
        ("micro_batches", "sequence_schedule = [[9, 65]]\nmicro_batches", r"length up to the --seq-length, 64"),
        ("micro_batches", "sequence_schedule = [9, 32]\nmicro_batches", "sequence_schedule has 9"),
        ("micro_batches", "sequence_schedule = [[9, 3.5]]\nmicro_batches", "sequence_schedule has"),
    ],
)
def test_a_wrong_suite_is_told(folder: Path, before: str, after: str, said: str) -> None:
    assert before in SUITE
    with pytest.raises(SuiteError, match=said):
        load(folder, SUITE.replace(before, after, 1))


def test_ours_ask_for_the_same_allocator_of_everybody() -> None:
    suite = load_suite(find_suite("h200-planner"))
    assert {case.name for case in suite.cases} == {"L16-h4096", "L4-h8192", "L4-moe", "L6-lengths"}
    for case in suite.cases:
        assert case.peak == "reserved"
        assert any(method.searches for method in case.methods)
        for method in case.methods:
            if method.plan_file is None:
                request = case.request(method, Memory(10.0, 10.0))
                assert request.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


# -------------------------------------------------------------------------------------------- results and runner


class PlannedChild(FakeChild):
    """A fake process whose planned runs report their plan.

    ``unstable``: steps that were timed too early. ``changed``: other measurements of planned runs.
    """

    unstable: list[int] = []  # noqa: RUF012
    changed: dict[str, Any] = {}  # noqa: RUF012

    def finish(self, *arguments: Any) -> Finished:
        finished = super().finish(*arguments)
        is_planned = any(flag in self.request.flags for flag in ("--swap-memory-gib", "--swap-plan"))
        if is_planned and finished.outcome == "ok":
            finished.result.update(
                planning=PLANNING, unstable_steps=self.unstable, saved_peak_gib=None, **self.changed
            )  # fmt: skip
        return finished


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> type[PlannedChild]:
    FakeChild.log, FakeChild.outcomes, FakeChild.interrupt_at = [], {}, ""
    PlannedChild.unstable, PlannedChild.changed = [], {}
    monkeypatch.setattr(runner, "Child", PlannedChild)
    return PlannedChild


def results_in(suite: Suite, folder: Path, *, resume: bool = False) -> SuiteResults:
    return SuiteResults(suite, folder / "rows.jsonl", FACTS, "python tools/bench.py", resume=resume)


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in read_rows(folder / "rows.jsonl")}


def run(suite: Suite, folder: Path, *, resume: bool = False) -> list[str]:
    labels: list[str] = []
    assert measure(suite, results_in(suite, folder, resume=resume), time_limit_s=None, on_done=done_into(labels))
    return labels


@pytest.mark.usefixtures("children")
def test_budgets_come_from_the_unswapped_run(folder: Path) -> None:
    run(load(folder), folder)
    rows = rows_of(folder)
    assert [row["outcome"] for row in rows.values()] == ["ok"] * 5
    # The unswapped run had 2 GiB of its peak of 5 before any activation.
    assert rows["auto-2"]["flags"].endswith("--swap-memory-gib 4.000000")
    assert rows["auto-50%"]["flags"].endswith("--swap-memory-gib 3.500000")
    assert (rows["none"]["peak"], rows["none"]["env"]) == ("reserved", {"MINE": "yes"})
    for name in ("auto-2", "auto-50%", "planned"):
        assert {field: rows[name][field] for field in PLANNING} == PLANNING
    assert rows["none"]["budget_gib"] is None
    assert rows["full"]["num_replans"] is None


def test_a_budget_that_is_not_known_yet_starts_no_process_ahead(folder: Path, children: type[PlannedChild]) -> None:
    suite = load(folder).chosen([], ["none", "auto-2", "full"], None)
    order = [method for name in ("none", "auto-2", "full") for method in suite.cases[0].methods if method.name == name]
    suite = replace(suite, cases=(replace(suite.cases[0], methods=tuple(order)),))
    run(suite, folder)
    assert children.log[:4] == ["start none", "go none", "time none", "close none"]
    assert rows_of(folder)["auto-2"]["outcome"] == "ok"


@pytest.mark.usefixtures("children")
def test_what_is_not_ready_is_told_and_run_when_it_is(folder: Path) -> None:
    suite = load(folder)
    (folder / "plans" / "one.json").unlink()
    assert run(suite.chosen([], ["auto-2", "planned"], None), folder) == ["auto-2 1 not ready", "planned 1 not ready"]
    rows = rows_of(folder)
    assert "is relative to the method 'none'" in rows["auto-2"]["output_tail"]
    assert "plans/one.json is not there. A prediction is committed before" in rows["planned"]["output_tail"]
    assert rows["auto-2"]["flags"].endswith("static+2")
    (folder / "plans" / "one.json").write_text("{}")
    assert run(suite, folder, resume=True) == ["none 1 ok", "full 1 ok", "auto-2 1 ok", "auto-50% 1 ok", "planned 1 ok"]
    assert run(suite, folder, resume=True) == []
    assert rows_of(folder)["auto-2"]["flags"].endswith("--swap-memory-gib 4.000000")


@pytest.mark.usefixtures("children")
def test_a_reference_that_failed_makes_the_others_wait(folder: Path) -> None:
    FakeChild.outcomes = {"none": "oom_device"}
    assert run(load(folder).chosen([], ["none", "auto-2"], None), folder) == ["none 1 oom_device", "auto-2 1 not ready"]


def test_steps_that_were_timed_too_early_make_the_outcome(folder: Path, children: type[PlannedChild]) -> None:
    children.unstable = [13, 14]
    assert "auto-2 1 not stable" in run(load(folder), folder)
    row = rows_of(folder)["auto-2"]
    assert row["output_tail"] == (
        "steps [13, 14] were timed and not stable: begin later (warm_up_auto). Stages: stable 9 to 15: settled"
    )
    assert row["budget_gib"] == 4.0, "what it has measured is kept"
    assert row["losses_equal"] is True


def test_a_run_without_a_stable_step_keeps_its_row(folder: Path, children: type[PlannedChild]) -> None:
    children.unstable, children.changed = [13, 14, 15], {"step_ms_all": [], "step_ms_median": None}
    assert "auto-2 1 not stable" in run(load(folder), folder)
    row = rows_of(folder)["auto-2"]
    assert (row["outcome"], row["step_ms_median"], row["tokens_per_s"]) == ("not stable", None, None)
    assert (row["losses_equal"], row["device_peak_gib"]) == (True, 5.0), "what it has measured is kept"
    assert "| **auto-2** | timed before its plan was stable |" in markdown(list(rows_of(folder).values()))


@pytest.mark.usefixtures("children")
def test_only_the_same_allocator_is_resumed(folder: Path) -> None:
    run(load(folder), folder)
    for before, after, said in (
        ('MINE = "yes"', 'MINE = "no"', "has env {'MINE': 'yes'} for one none"),
        ('peak = "reserved"', 'peak = "allocated"', "has peak 'reserved' for one none"),
    ):
        with pytest.raises(StoreError, match=said):
            results_in(load(folder, SUITE.replace(before, after)), folder, resume=True)


def test_rounds_that_planned_differently() -> None:
    runs = [
        {"round": 1, "outcome": "ok", "command": "a", **result(), "planning": {**PLANNING, "num_replans": 0}},
        {"round": 2, "outcome": "ok", "command": "a", **result(), "planning": {**PLANNING, "predicted_peak_gib": 1.0}},
    ]
    row = merge(runs, runs)
    assert (row["predicted_peak_gib"], row["num_replans"]) == (3.9, 1)


def test_without_a_gpu_a_budget_is_of_what_autograd_holds(
    folder: Path, children: type[PlannedChild], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OnCpu(children):  # type: ignore[valid-type, misc]
        def finish(self, *arguments: Any) -> Finished:
            finished = super().finish(*arguments)
            finished.result.update(device_peak_gib=None, device_static_gib=None, saved_peak_gib=0.25)
            return finished

    monkeypatch.setattr(runner, "Child", OnCpu)
    run(load(folder, SUITE.replace('"reserved"', '"saved"')), folder)
    rows = rows_of(folder)
    assert rows["auto-50%"]["flags"].endswith("--swap-memory-gib 0.125000")
    assert rows["none"]["saved_peak_gib"] == 0.25
