"""Measurements of steps by a run that plans itself, on a device with made-up memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.plan import Plan, load_plan
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, SwapError, UsageError
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.planner.profile import Link
from megatron.swap.planning.controller import AutoPlan, PlanFiles
from megatron.swap.planning.state_machine import Stage, Transition
from megatron.swap.planning.target import PlanTarget, RunParts
from megatron.swap.planning.workload import Step
from megatron.swap.profiling.footprint import FootprintMeter
from megatron.swap.profiling.recorder import Recorder
from tests.engine import watch
from tests.lazy_device import LazyDevice
from tests.unit.planner.cases import model, random_profile


class CachingDevice(LazyDevice):
    """A device whose allocator keeps reserved memory until it must release what is unused."""

    def __init__(self, reserves: bool = True) -> None:
        super().__init__()
        self.reserves = reserves
        self.allocated_gib = self.reserved_gib = self.peak_gib = 0.0
        self.num_retries = 0

    def take_retries(self) -> int:
        taken, self.num_retries = self.num_retries, 0
        return taken

    def use(self, gib: float) -> None:
        """Hold this many bytes for a moment."""
        self.reserved_gib = max(self.reserved_gib, gib)
        self.peak_gib = max(self.peak_gib, gib)

    def reserved_bytes(self) -> int | None:  # type: ignore[override]
        return int(self.reserved_gib * GIB) if self.reserves else None

    def allocated_bytes(self) -> int:  # type: ignore[override]
        return int(self.allocated_gib * GIB)

    def release_cached(self) -> None:
        self.reserved_gib = 0.0

    def taken(self) -> tuple[int, int]:
        peak_gib, self.peak_gib = self.peak_gib, 0.0
        return int(peak_gib * GIB), 0


class DecidedMachine:
    """A fake of the state machine: the test sets stage and plan, and steps change nothing."""

    def __init__(self) -> None:
        self.stage = Stage.PROFILE
        self.plan: Plan | None = None
        self.planned = None
        self.has_been_stable, self.num_steps_needed = False, 0
        self.steps: list[Step] = []

    def step_ended(self, step: Step, has_new_numbers: bool = False) -> Transition:
        self.steps.append(step)
        return Transition(self.stage, self.plan)


class Training:
    """Steps of a run. The test says how much memory each holds."""

    def __init__(self, device: CachingDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.chunk = nn.Linear(2, 2)
        self.num_micro_batches = 1
        self.target = PlanTarget(Settings(memory_gib=12.0), lambda: model(8), 80.0, ())
        self.lines: list[str] = []
        unused: Any = None
        recorder = Recorder(device, Ranges(), device.taken)
        self.num_followed = 0
        boundaries: Any = SimpleNamespace(apply_policy=self.apply_policy, chunks=tuple)
        parts = self.parts = RunParts(
            boundaries, device, unused, recorder, FootprintMeter(), 0, lambda: self.num_micro_batches, lambda: GIB,
            device.taken,
        )  # fmt: skip
        self.auto = AutoPlan(self.target, parts, self.lines.append, self.lines.extend)
        self.machine = DecidedMachine()
        self.steps = self.machine.steps
        monkeypatch.setattr(self.auto, "_machine", self.machine)
        watch(recorder, self.chunk)
        self.chunk.register_forward_pre_hook(lambda *_: self.auto.chunk_begins(), prepend=True)

    def apply_policy(self, window_bytes: int | None) -> None:
        self.num_followed += 1

    def over(self, gib: float, num_retries: int = 0, short_gib: float = 0.0) -> float:
        """Run a step. Return by how much it counts as above 12 GiB."""
        self.step(gib, num_retries=num_retries, short_gib=short_gib)
        return self.steps[-1].over_gib(12.0)

    def step(self, gib: float, is_short: bool = False, num_retries: int = 0, short_gib: float = 0.0) -> float:
        """Run a step. Return the peak that it is judged by."""
        for _ in range(2):
            self.chunk(torch.ones(2))
            self.device.use(gib)
        self.target.policy.is_short = is_short
        self.auto.step_ended(len(self.steps) + 1, int(short_gib * GIB), num_retries)
        return self.steps[-1].peak_gib

    def save(self, gib: float) -> None:
        """Write a checkpoint, for which all state is materialized."""
        self.device.use(gib)
        self.device.num_retries += 1

    def evaluate(self, gib: float) -> None:
        with torch.no_grad():
            for _ in range(2):
                self.chunk(torch.ones(2))
                self.device.use(gib)


def test_layers_that_never_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else does their work, which is not swapped."""
    training = Training(CachingDevice(), monkeypatch)
    profiler = training.auto._profiler
    training.parts.layers.chunks = lambda: ((0, 1),)  # type: ignore[attr-defined]
    monkeypatch.setattr(profiler, "_link", Link(1, 1, 1, 1))
    profiler.record(2)
    training.parts.recorder.step_ended(3)
    with pytest.raises(SwapError, match="none of this rank's layers ran"):
        profiler.finish_recording(1)


def test_a_budget_that_the_model_alone_exceeds_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(CachingDevice(), monkeypatch)
    training.device.allocated_gib = 12.5
    message = r"may use 12 GiB of device memory, and weights, .* take 12\.50 GiB before the first step"
    with pytest.raises(UsageError, match=message):
        training.step(13.0)
    training = Training(CachingDevice(), monkeypatch)
    training.device.allocated_gib = 11.5
    training.step(12.0)
    training.device.allocated_gib = 12.5
    training.step(12.0)


@pytest.mark.parametrize("reserves", [True, False])
@pytest.mark.parametrize("between", [Training.evaluate, Training.save])
def test_what_lies_between_steps_is_not_the_next_ones(
    between: Callable[[Training, float], None], reserves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CachingDevice(reserves)
    device.use(20.0)  # by building the model
    training = Training(device, monkeypatch)
    assert training.step(10.0) == 10.0
    device.num_retries = 2
    between(training, 14.0)
    device.num_retries = 5
    assert training.step(10.0) == 10.0
    assert device.take_retries() == 0
    between(training, 14.0)
    between(training, 9.0)
    assert training.step(11.0) == 11.0
    assert training.step(12.0) == 12.0


def test_a_device_that_is_full_counts_as_above_the_budget_once_plans_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(CachingDevice(), monkeypatch)
    assert training.step(11.0, num_retries=3) == 11.0, "while steps are measured the device may be full"
    training.machine.stage = Stage.STABLE
    training.machine.plan = Plan(model(8), None, None, None, ())
    num_lines = len(training.lines)
    assert training.over(11.0) == -1.0
    assert training.over(11.0, num_retries=3) == 0.5
    assert training.over(11.0, num_retries=1) == 0.5
    assert training.over(11.0, num_retries=1, short_gib=0.25) == 0.25, "a rescue says how much there was too little"
    assert training.over(13.0, num_retries=1) == 1.0
    assert len(training.lines) == num_lines + 1
    assert "the device is full" in training.lines[-1]
    training.machine.plan = Plan(model(8), None, None, None, (), 0.5)
    training.over(11.0, num_retries=1)
    assert len(training.lines) == num_lines + 2, "of each plan once"


def test_a_step_is_not_judged_by_the_time_of_one_with_fewer_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for the device under a chosen plan, so the known time is that of the step before."""
    training = Training(CachingDevice(), monkeypatch)
    training.machine.stage = Stage.STABLE
    known = []
    for training.num_micro_batches in (1, 1, 1, 4, 4, 2, 2):
        training.step(11.0)
        known.append(training.steps[-1].ms is not None)
    assert known == [False, True, True, False, True, False, True]


def test_what_a_step_took_that_was_larger_than_planned_is_not_the_next_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(CachingDevice(), monkeypatch)
    assert training.step(14.0, is_short=True) == 14.0
    assert not training.target.policy.is_short
    assert training.num_followed == 1
    assert training.step(10.0) == 10.0


def test_a_plan_says_how_much_optimizer_state_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    training, asked = Training(CachingDevice(), monkeypatch), list[float]()
    training.auto._target = replace(training.target, settings=Settings(memory_gib=12.0, optimizer="auto"))
    training.auto._parts = replace(training.parts, set_offload_fraction=asked.append)
    training.auto._apply_plan(Plan(model(8), None, None, None, (), offload_fraction=0.25))
    assert asked == [0.25]


def test_training_that_ends_before_a_plan_is_chosen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(CachingDevice(), monkeypatch)
    training.machine.num_steps_needed = 19
    said = []
    for training.machine.has_been_stable in (True, False):
        training.lines.clear()
        training.auto.finish()
        said.append([*training.lines])
    assert said == [[], ["training ended before a plan was chosen, which takes up to 19 steps"]]


@pytest.mark.parametrize("full", ["save_plan", "save_profile"])
def test_a_file_that_cannot_be_written_takes_no_other_with_it(
    full: str, tmp_path: Path
) -> None:
    plan, profile = Plan(model(8), None, None, None, ()), random_profile(1)
    paths = {"save_plan": str(tmp_path / "a" / "plan.json"), "save_profile": str(tmp_path / "b" / "profile.json")}
    config, lines = Settings(policy="auto"), list[str]()
    files = PlanFiles(replace(config, **{**paths, full: "/dev/full"}), 0, 0, lines.append)  # type: ignore[arg-type]
    files.save(plan, profile, {0: 0})
    if full == "save_profile":
        assert load_plan(paths["save_plan"]) == plan
    else:
        assert load_profile(paths["save_profile"]) == profile
    flag = f"--{full.replace('_', '-')}".replace("--", "--swap-")
    assert lines == [f"{flag} was not written: [Errno 28] No space left on device"]


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_of_a_pipeline_each_stage_writes_its_profile_and_rank_0_the_plan(rank: int, tmp_path: Path) -> None:
    config = Settings(
        policy="auto", save_plan=str(tmp_path / "plan.json"), save_profile=str(tmp_path / "profile.json")
    )
    files = PlanFiles(config, rank, rank // 2, print)
    files.save(Plan(model(8), None, None, None, ()), random_profile(1), {0: 1, 1: 2})
    written = {0: {"plan.json"}, 1: {"profile.stage-0.json"}, 2: {"profile.stage-1.json"}, 3: set()}
    assert {path.name for path in tmp_path.iterdir()} == written[rank]
