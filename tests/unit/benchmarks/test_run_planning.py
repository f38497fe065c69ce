"""The reported plan of a run, unstable timed steps, and sequences that change their length."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.runner import stopwatch
from benchmarks.runner.planning import plan_file, planning, searches, unstable_steps
from benchmarks.runner.request import Request
from benchmarks.runner.schedule import cut, length_at
from benchmarks.runner.stopwatch import EnoughSteps, Stopwatch
from megatron.swap.common.plan import Model, Plan, Predicted, save_plan

AUTO = ("--lr", "1", "--swap-memory-gib", "83")
STAGES = [
    {"stage": "profile", "first_step": 1, "last_step": 3, "note": "", "predicted_peak_gib": None},
    {"stage": "search", "first_step": 4, "last_step": 9, "note": "", "predicted_peak_gib": 82.0},
    {"stage": "stable", "first_step": 10, "last_step": 14, "note": "", "predicted_peak_gib": 81.5},
    {"stage": "profile", "first_step": 15, "last_step": 16, "note": "a shape changed", "predicted_peak_gib": None},
    {"stage": "stable", "first_step": 17, "last_step": None, "note": "", "predicted_peak_gib": 70.0},
]
FOUND = {
    "budget_gib": 83.0, "predicted_peak_gib": 70.0, "predicted_step_ms": 1300.0, "profile_sha256": "f00d",
    "num_replans": 1, "stages": STAGES,
}  # fmt: skip
OF_RUN = {**FOUND, "predicted_peak_gib": 82.0}
"""Plan figures of a whole run. Its peak is that of the highest plan that it followed."""


def a_plan(path: Path, **changed: Any) -> Path:
    model = Model(4, 8, 8, 2, 2, 16, 1, 128, "local", "bf16", gated=False)
    values = {"budget_gib": 80.0, "profile_sha256": "beef", "predicted": Predicted(79.5, 1400.0, 1390.0, 9.0)}
    save_plan(Plan(model, **{**values, **changed}, classes=()), path)  # type: ignore[arg-type]
    return path


def test_who_searches() -> None:
    assert searches(AUTO)
    assert searches(("--swap-memory-fraction", "0.9"))
    assert searches(("--swap-policy", "auto"))
    assert not searches(("--swap-policy", "manual", "--swap-layers", "auto"))
    assert not searches(("--swap-plan", "plan.json"))
    assert plan_file(("--swap-plan", "plan.json")) == "plan.json"
    assert plan_file(AUTO) is None


def test_the_session_tells_what_was_planned() -> None:
    assert planning(AUTO, FOUND) == OF_RUN
    assert planning(("--swap-layers", "all"), None) is None
    with pytest.raises(ValueError, match="searched for its plan does not report a plan"):
        planning(AUTO, None)


def test_a_plan_file_promises_what_stands_in_it(tmp_path: Path) -> None:
    flags = ("--swap-plan", str(a_plan(tmp_path / "plan.json")))
    prediction = {
        "budget_gib": 80.0, "predicted_peak_gib": 79.5, "predicted_step_ms": 1400.0, "lower_bound_ms": 1390.0,
        "profile_sha256": "beef", "num_replans": 0, "stages": [],
    }  # fmt: skip
    assert planning(flags, None) == prediction
    combined = planning(flags, {**FOUND, "num_replans": 2})
    assert combined == {**prediction, "num_replans": 2, "stages": STAGES}, "no other prediction takes its place"
    hand = a_plan(tmp_path / "hand.json", budget_gib=None, profile_sha256=None, predicted=None)
    assert planning(("--swap-plan", str(hand)), None) == {**dict.fromkeys(prediction), "num_replans": 0, "stages": []}


@pytest.mark.parametrize(
    ("first", "last", "unstable"),
    [(10, 14, []), (17, 40, []), (9, 12, [9]), (12, 20, [15, 16]), (1, 5, [1, 2, 3, 4, 5])],
)
def test_steps_that_were_timed_and_not_stable(first: int, last: int, unstable: list[int]) -> None:
    assert unstable_steps(AUTO, FOUND, first, last) == unstable
    assert unstable_steps(("--swap-plan", "x.json"), FOUND, first, last) == [], "nothing is tried"
    assert unstable_steps(AUTO, None, first, last) == []


def test_a_request_survives_its_file() -> None:
    request = Request(flags=("a", "b"), num_warm_up=2, num_timed=3, sequence_schedule=((50, 64), (50, 32)))
    assert Request.from_json(request.to_json()) == request


def test_the_length_of_a_step() -> None:
    schedule = ((2, 64), (1, 32), (3, 48))
    assert [length_at(schedule, step) for step in range(1, 14)] == [64, 64, 32, 48, 48, 48, 64, 64, 32, 48, 48, 48, 64]


def test_batches_are_cut() -> None:
    tokens = torch.arange(24).view(2, 12)
    lengths = iter([12, 5])
    program = Namespace(get_batch=lambda *args: [tokens, tokens + 1, None])
    cut(program, lambda: next(lengths))
    assert torch.equal(program.get_batch(None, None)[0], tokens)
    inputs, labels, mask = program.get_batch(None, None)
    assert torch.equal(inputs, tokens[:, :5])
    assert torch.equal(labels, tokens[:, :5] + 1)
    assert mask is None
    assert inputs.is_contiguous()
    inputs.view(-1)  # as the loss does


def test_an_attention_mask_is_not_cut_wrongly() -> None:
    program = Namespace(get_batch=lambda *args: [torch.zeros(2, 1, 8, 8)])
    cut(program, lambda: 4)
    with pytest.raises(ValueError, match="holds an attention mask"):
        program.get_batch(None, None)


class Nobody:
    def report(self, stage: str) -> None: ...

    def await_word(self, word: str) -> None: ...


def watched(request: Request, num_steps: int, auto: Any = None) -> tuple[Stopwatch, int]:
    """Return a stopwatch that has seen so many training steps, and their number."""
    watch = Stopwatch(request, Nobody(), None)
    watch._args = Namespace(train_iters=num_steps, global_batch_size=4, seq_length=64)
    watch._session = Namespace(
        parts=None, auto=auto, planned=Namespace(disk=None), optimizer_swap=None,
        run_device=Namespace(is_made=False, observer=None),
    )
    for iteration in range(1, num_steps + 1):
        assert watch.step == iteration
        try:
            watch._on_iteration(iteration, {}, None, True, None)
        except EnoughSteps:
            return watch, iteration
    return watch, num_steps


@pytest.mark.parametrize(("num_timed", "num_steps"), [(None, 9), (3, 5), (1, 3), (7, 9)])
def test_shorter_than_the_longest_run_of_its_case(num_timed: int | None, num_steps: int) -> None:
    assert watched(Request(flags=(), num_warm_up=2, num_timed=num_timed), 9)[1] == num_steps


def test_timed_are_the_steps_after_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import training

    monkeypatch.setattr(training, "num_floating_point_operations", lambda args, batch: args.seq_length * batch)
    monkeypatch.setattr(stopwatch.Phases, "medians", lambda self: {})
    auto = Namespace(summary=lambda: FOUND)
    schedule = ((10, 64), (10, 32))
    for num_warm_up, unstable in ((9, [15, 16]), (16, [])):
        request = Request(flags=AUTO, num_warm_up=num_warm_up, sequence_schedule=schedule)
        found = watched(request, 20, auto)[0].result(tmp_path)
        assert len(found["step_ms_all"]) == 20 - num_warm_up - len(unstable)
        assert found["planning"] == OF_RUN
        assert found["unstable_steps"] == unstable
        assert found["saved_peak_gib"] is None
        assert (found["tokens_per_step"], found["step_flops"]) == (4 * 32, 4 * 32), "the length of the timed steps"
