"""The next trial of a sweep, its rows, and resuming it. No trainer runs here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import UNPLANNED, RowError, read_rows
from benchmarks.runner.launch import Finished
from benchmarks.store import StoreError
from benchmarks.sweeps import rows as sweep_rows
from benchmarks.sweeps import runner
from benchmarks.sweeps.results import measured
from benchmarks.sweeps.runner import attempt, measure
from benchmarks.sweeps.search import following
from benchmarks.sweeps.table import champions, largest_by_method, machine_limit, markdown
from tests.unit.benchmarks.sweep_cases import FILE, GOOD, FakeTraining, a_sweep, results_in, search

UNTIMED = {"step_ms_all": [], "step_ms_median": None}


def path_of(count: int, start: int, trains: Callable[[int], bool], *, trusted: bool = True) -> list[int]:
    """Return the values that the search tries, in order."""
    tried: dict[int, bool] = {}
    while (place := following(count, start, tried, trusted=trusted)) is not None:
        assert place not in tried
        tried[place] = trains(place)
    return list(tried)


@pytest.mark.parametrize(
    ("start", "trains", "tried"),
    [
        (5, lambda at: at <= 5, [5, 6]),
        (5, lambda at: at <= 6, [5, 6, 8, 7]),
        (5, lambda at: True, [5, 6, 8, 11]),
        (11, lambda at: True, [11]),
        (5, lambda at: at <= 4, [5, 4]),
        (5, lambda at: at <= 1, [5, 4, 2, 0, 1]),
        (5, lambda at: False, [5, 4, 2, 0]),
        (0, lambda at: False, [0]),
        (5, lambda at: at != 4, [5, 6, 8, 11]),
        (5, lambda at: at in (2, 4), [5, 4]),
    ],
)
def test_the_places_that_are_tried(start: int, trains: Callable[[int], bool], tried: list[int]) -> None:
    assert path_of(12, start, trains) == tried


def test_where_the_start_is_a_bound_it_goes_by_halves() -> None:
    assert path_of(12, 11, lambda at: at <= 4, trusted=False) == [11, 5, 2, 3, 4]


@pytest.mark.parametrize("trusted", [True, False])
def test_the_largest_is_found_from_everywhere(trusted: bool) -> None:
    for start in range(12):
        for largest in range(-1, 12):
            tried = path_of(12, start, lambda at, largest=largest: at <= largest, trusted=trusted)
            assert max((at for at in tried if at <= largest), default=-1) == largest
            assert min((at for at in tried if at > largest), default=12) == largest + 1
            assert len(tried) <= 8


def layers(fits: int) -> Callable[[Any], bool]:
    return lambda trial: trial.value.number <= fits


def test_a_search_begins_where_the_memory_model_says(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    train = FakeTraining(lambda trial: trial.value.number <= {"none": 26, "deep": 20, "ours": 56}[trial.method.name])
    rows = search(sweep, results_in(sweep, tmp_path), train)
    assert train.asked[:2] == [("none", 26), ("none", 28)]
    assert ("ours", 54) in train.asked
    by_value = {row["value"]: row for row in rows["none"]}
    assert (by_value[26]["outcome"], by_value[28]["outcome"]) == ("ok", "oom_device")
    pruned = [row for row in rows["none"] if row["outcome"] == "pruned"]
    assert [row["values"][0] for row in pruned] == [30]
    assert pruned[0]["values"] == list(range(30, 82, 2))
    assert "30 layers is predicted to take 148.14 GiB of device memory, 139.80 GiB are there" in pruned[0]["why"]
    found = {one.method: one for one in largest_by_method(stored_rows(tmp_path))}
    assert [(name, one.best["value"]) for name, one in found.items() if one.best] == [
        ("deep", 20), ("none", 26), ("ours", 56)
    ]  # fmt: skip
    assert found["none"].stopped_by == "28 layers: out of device memory"
    assert "--swap-optimizer 0." in rows["ours"][0]["flags"]


def stored_rows(folder: Path) -> list[Any]:
    return read_rows(folder / "rows.jsonl", sweep_rows.check)


def test_every_larger_value_was_tried_or_pruned(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    rows = search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(20)))
    for mine in rows.values():
        best = max(row["value"] for row in mine if row["outcome"] == "ok")
        larger = sorted(value for row in mine for value in row["values"] if value > best)
        assert larger == [value.number for value in sweep.values if value.number > best]
        assert all(row["why"] for row in mine if row["outcome"] == "pruned")


def test_nothing_trains(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path).chosen(["none"])
    rows = search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(0), outcome="oom_host"))["none"]
    assert rows[0]["value"] == 16
    (found,) = largest_by_method(rows)
    assert found.best is None
    assert found.stopped_by == "16 layers: out of host memory"
    assert found.limit.endswith("The next value lacks host memory.")
    assert "| none | none that was tried | – |" in markdown(rows)


def test_all_that_is_not_pruned_trains(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path).chosen(["none"])
    rows = search(sweep, results_in(sweep, tmp_path), FakeTraining(lambda trial: True))["none"]
    (found,) = largest_by_method(rows)
    assert found.best is not None
    assert found.best["value"] == 28
    assert found.stopped_by.startswith("not tried: 30 layers is predicted to take")
    assert found.lacks == "device"
    for outcome in ("timeout", "failed (1)", "loss not falling"):
        ended = {**rows[-1], "value": 30, "outcome": outcome, "why": None}
        assert largest_by_method([*rows[:-1], ended])[0].lacks is None
    short_of_disk = {**rows[-1], "value": 30, "why": str(rows[-1]["why"]).replace("device", "disk")}
    assert largest_by_method([*rows[:-1], short_of_disk])[0].lacks == "disk"
    others = [{**row, "commit": "0" * 40, "why": "of another day"} for row in rows if row["outcome"] == "pruned"]
    assert largest_by_method([*others, *rows]) == largest_by_method([*rows, *others]) == [found]


def test_what_limits_a_method_says_how_full_each_tier_is(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(26)))
    found = {one.method: one for one in largest_by_method(stored_rows(tmp_path))}
    assert "that are measured of the device's 139.8" in found["deep"].limit, "the memory model does not know it"
    assert "of 112.0 GiB of host memory beside it" in found["ours"].limit
    best, stop = found["ours"].best, found["ours"].stop
    assert best is not None
    assert stop is not None
    crowded = {**best, "predicted": {**best["predicted"], "device_gib": 130.0, "static_gib": 125.0, "host_gib": 108.0}}
    with_disk = {**crowded, "flags": f"{best['flags']} --swap-disk-dir /tmp --swap-disk-gib 20"}
    for row, disk_gib, text in (
        (crowded, None, "a larger model, and the other tiers are nearly full."),
        ({**crowded, "predicted": {**crowded["predicted"], "host_gib": 60.0}}, None, "makes room for a larger model."),
        (with_disk, 19.0, "108.0 of 112.0 GiB of host and 19.0 of 20.0 GiB of disk memory beside it. Activations"),
        (with_disk, 5.0, "makes room for a larger model."),
    ):
        changed = {**row, "predicted": {**row["predicted"], "disk_gib": disk_gib}}
        changed["tiers_gib"] = {**row["tiers_gib"], "disk": 60.0}
        ended = {**stop, "outcome": "oom_device", "why": None}
        assert text in largest_by_method([changed, ended])[0].limit
    large = {**stop["predicted"], "device_gib": 150.0, "host_gib": 119.0, "disk_gib": None}
    for outcome, last in (("oom_host", "host and device"), ("oom_disk", "disk and device and host")):
        (one,) = largest_by_method([best, {**stop, "predicted": large, "outcome": outcome, "why": None}])
        assert one.limit.endswith(f" The next value lacks {last} memory.")


def test_a_search_that_was_interrupted_is_no_answer(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path).chosen(["none"])
    rows = search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(20)))["none"]
    best = next(row for row in rows if row["value"] == 20)
    failed = {**best, "value": 24, "case": "later", "outcome": "oom_host", "why": None}
    (found, _) = largest_by_method([best, failed, {**best, "value": 22, "method": "another"}])
    assert found.is_open
    assert found.stopped_by == "later: out of host memory; nothing between was tried"
    assert found.limit.endswith("Nothing between was tried: this is not its limit.")


def test_a_loss_that_does_not_fall_is_no_training(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path).chosen(["none"])

    def train(sweep: Any, trial: Any) -> Any:
        return "ok", {**GOOD, "num_params": trial.params, "losses": [(1.0).hex()] * 20}, None

    results = results_in(sweep, tmp_path)
    measure(sweep, results, time_limit_s=None, on_done=lambda *_: None, train=train)
    assert {row["outcome"] for row in results.rows()} == {"loss not falling", "pruned"}


def test_interrupted_and_resumed_it_ends_as_it_would_have(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    sweep = a_sweep(tmp_path)
    whole = FakeTraining(layers(24))
    expected = search(sweep, results_in(sweep, tmp_path / "whole"), whole)
    for stop_after in range(len(whole.asked)):
        folder = tmp_path / str(stop_after)
        folder.mkdir()
        first = FakeTraining(layers(24), stop_after=stop_after)
        with pytest.raises(KeyboardInterrupt):
            measure(sweep, results_in(sweep, folder), time_limit_s=None, on_done=lambda *_: None, train=first)
        second = FakeTraining(layers(24))
        rows = search(sweep, results_in(sweep, folder, resume=stop_after > 0), second)
        assert first.asked + second.asked == whole.asked
        assert all(row["date"] for mine in rows.values() for row in mine)
        both = (*rows.values(), *expected.values())
        strip = [[{**row, "run_s": None, "date": None} for row in mine] for mine in both]
        assert strip[: len(rows)] == strip[len(rows) :]


def test_time_is_up(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    results = results_in(sweep, tmp_path)
    assert not measure(sweep, results, time_limit_s=-1.0, on_done=lambda *_: None, train=FakeTraining(layers(24)))
    assert results.num_left(sweep.methods) >= 9


@pytest.mark.parametrize(
    ("outcome", "raised"),
    [("timeout", ("time_limit_s = 60", "time_limit_s = 61")), ("oom_host", ("host_limit_gib = 118", ""))],
)
def test_what_a_limit_has_stopped_is_run_again_with_a_higher_one(
    outcome: str, raised: tuple[str, str], tmp_path: Path
) -> None:
    sweep = a_sweep(tmp_path).chosen(["none"])
    search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(20), outcome=outcome))
    again = FakeTraining(layers(26))
    search(sweep, results_in(sweep, tmp_path, resume=True), again)
    assert not again.asked, "nothing has changed"
    sweep = a_sweep(tmp_path, FILE.replace(*raised)).chosen(["none"])
    rows = search(sweep, results_in(sweep, tmp_path, resume=True), again)["none"]
    assert max(row["value"] for row in rows if row["outcome"] == "ok") == 26


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path).chosen(["none"])
    search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(24)))
    with pytest.raises(StoreError, match=r"rows\.jsonl exists: continue it with --resume"):
        results_in(sweep, tmp_path)
    with pytest.raises(StoreError, match=r"has commit 'c0ffee' for none .*this run has 'other'"):
        results_in(sweep, tmp_path, resume=True, commit="other")
    with pytest.raises(StoreError, match=r"has flags .* rows of one file must be comparable"):
        results_in(a_sweep(tmp_path, FILE.replace("4096", "2048")), tmp_path, resume=True)
    with pytest.raises(StoreError, match=r"has warm_up 2 for .*, this run has 3"):
        results_in(a_sweep(tmp_path, f"warm_up = 3\n{FILE}"), tmp_path, resume=True)
    with pytest.raises(StoreError, match=r"has none .* layers, which sweep small has not"):
        results_in(a_sweep(tmp_path, FILE.replace("first = 16", "first = 17")), tmp_path, resume=True)


def test_a_package_that_is_missing_ends_a_method_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sweeps.runner.missing", lambda method: "torchtune")
    sweep = a_sweep(tmp_path).chosen(["deep"])
    results = results_in(sweep, tmp_path)
    assert measure(sweep, results, time_limit_s=None, on_done=lambda *_: None, train=attempt)
    assert next(row["outcome"] for row in results.rows()) == "missing: torchtune"
    assert len([row for row in results.rows() if row["outcome"] != "pruned"]) == 1


def test_rows_keep_to_their_schema(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path).chosen(["none"])
    rows = search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(24)))["none"]
    good = next(row for row in rows if row["outcome"] == "ok")
    assert good["mfu"] == pytest.approx(1e14 / 1.0 / 1e12 / 989)
    assert good["tokens_per_s"] == 32768
    assert good["loss_first"] > good["loss_last"]
    for change, said in (
        ({"value": "48"}, "'value' is '48', not of type int"),
        ({"value": True}, "'value' is True"),
        ({"is_ours": 1}, "'is_ours' is 1"),
        ({"loss_last": None}, "'loss_last' is null"),
        ({"predicted": {"device_gib": "1"}}, "predicted.device_gib is '1'"),
        ({"tiers_gib": {}}, "tiers_gib.device is 'missing'"),
        ({"outcome": "pruned"}, "'why' is null"),
        ({"outcome": "crashed"}, "'outcome' is 'crashed'"),
    ):
        with pytest.raises(RowError, match=said):
            sweep_rows.check({**good, **change})
    for field in ("axis", "values", "mfu", "why"):
        with pytest.raises(RowError, match=f"'{field}' is missing"):
            sweep_rows.check({key: value for key, value in good.items() if key != field})


def test_the_physical_limit_and_the_champions(tmp_path: Path) -> None:
    sweep = a_sweep(tmp_path)
    search(sweep, results_in(sweep, tmp_path), FakeTraining(layers(24)))
    rows = stored_rows(tmp_path)
    assert machine_limit(rows).params == pytest.approx((139.8 + 118.0) * 2**30 / 14)
    assert machine_limit(rows).text.endswith(
        "19.8 B parameters, 139.8 GiB of device + 118.0 GiB of host memory, as much as the sweep lets a run have, at "
        "14 bytes a parameter."
    )
    assert [row["value"] for row in champions(rows)] == [24, 24]
    assert "weights, gradients and the kept optimizer state take" in markdown(rows)
    assert "Nothing larger was tried" not in markdown(rows)
    smaller = [row for row in rows if row["outcome"] == "ok" or row["method"] != "none"]
    assert markdown(smaller).count("Nothing larger was tried: this is not its limit.") == 1


def test_a_row_has_the_stages_of_a_run_that_planned_itself() -> None:
    stages = [{"stage": "profile", "first_step": 1}]
    result = {"planning": {**UNPLANNED, "budget_gib": 5.0, "stages": stages, "num_infeasible": 0}, "losses": []}
    row = measured(result, None)
    assert (row["stages"], row["budget_gib"]) == (stages, 5.0)
    assert "num_infeasible" not in row
    assert measured({"losses": []}, None)["stages"] is None


def test_a_run_without_a_stable_step_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class OneRun:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __enter__(self) -> OneRun:
            return self

        def __exit__(self, *_: object) -> None: ...
        def say(self, word: str) -> None: ...
        def finish(self, *_: Any) -> Finished:
            planning = {"stages": [{"stage": "profile", "first_step": 1, "last_step": None, "note": "recorded"}]}
            return Finished("ok", {**GOOD, **UNTIMED, "planning": planning, "unstable_steps": [3, 4]}, "")

    monkeypatch.setattr(runner, "Child", OneRun)
    sweep = a_sweep(tmp_path, FILE.replace("--swap-optimizer fit + full-recompute", "--swap-memory-gib 130"))
    sweep = sweep.chosen(["ours"])
    assert measure(sweep, results_in(sweep, tmp_path), time_limit_s=None, on_done=lambda *_: None)
    rows = read_rows(tmp_path / "rows.jsonl", sweep_rows.check)
    assert {row["outcome"] for row in rows} == {"not stable", "pruned"}
    assert rows[0]["output_tail"] == "no timed step was stable: raise num_steps. Stages: profile 1 to the end: recorded"
    assert rows[0]["losses"] == GOOD["losses"], "what it has measured is kept"
    markdown(rows)
