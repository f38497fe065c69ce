"""A run that plans itself: measures, plans, tries, and follows; ``stages.py`` decides when.

Everything happens between steps, on all ranks at once, and every step trains. The plan is one for the whole model: each
stage of a pipeline plans its own layers, and ranks that hold the same layers follow the one of them that saves most.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.swap.calibration import measure_link, slowest_link
from megatron.swap.config import SwapConfig
from megatron.swap.devices.base import Device
from megatron.swap.footprint import Footprint, FootprintMeter
from megatron.swap.guard import OomGuard
from megatron.swap.layer import Boundaries
from megatron.swap.plan import Infeasible, Model, Plan, merged, save_plan
from megatron.swap.planner import profile as profiles
from megatron.swap.planner.build import build_profile, with_times
from megatron.swap.planner.profile import Link, Pipeline, Profile, Resting, save_profile
from megatron.swap.planner.schedule import most_telling
from megatron.swap.planner.shares import solve_shares
from megatron.swap.planner.solve import whole_layers
from megatron.swap.policy import PlanPolicy
from megatron.swap.ranks import Ranks
from megatron.swap.recorder import Recorder
from megatron.swap.recording import Recording
from megatron.swap.stages import DRIFT, SETTLING_STEPS, Stage, Stages, Step, Workload, moves
from megatron.swap.step_clock import StepClock
from megatron.swap.switch import SafePolicy, SwitchingPolicy
from megatron.swap.tiers.base import Tier
from megatron.swap.types import GIB, MIB, SwapError, UsageError, format_bytes

OVERLAP_STEPS = 1
"""Until optimizer state passes through beside layers as it will: buckets come in ahead once it is known what layers
hold, and leave beside the forward after that."""
FULL_BYTES = GIB // 2
"""A device that is full says not by how much it is too small: so much is tried."""


class _Measured(NamedTuple):
    """Of a workload, on this rank: while it was recorded."""

    profile: Profile
    footprint: Footprint


class AutoPlan:
    """The planner beside a training run.

    Args:
        config: budget, and where plan and profile go.
        model: what is trained.
        device_gib: memory of the device.
        recompute: producers whose outputs may be recomputed.
        say: told of every change of stage, for people.
        tell: told of what is this rank's alone.

    Attributes:
        policy: answers for every saved tensor; it changes between steps.
        has_switched: behind the last step; the next one holds another amount.
    """

    def __init__(
        self,
        config: SwapConfig,
        model: Model,
        device_gib: float,
        recompute: Collection[str],
        say: Callable[[str], None],
        tell: Callable[[Sequence[str]], None],
    ) -> None:
        min_bytes = int(config.min_mib * MIB)
        self._safe = SafePolicy(min_bytes, recompute)
        self.policy = SwitchingPolicy(self._safe, min_bytes)
        self._config = config
        self._model = model
        self._device_gib = device_gib
        self._budget_gib = config.budget_gib(device_gib)
        self._most_telling = most_telling(model.pipeline_parallel)
        self._say = say
        self._tell = tell
        self._link: Link | None = None
        self._recorded = Footprint(())
        self._untimed: Profile | None = None
        self._timed: list[tuple[Step, Recording]] = []
        self._num_micro_batches = 0
        self._is_between_steps = True
        self._reserved_bytes: int | None = None  # until the first step has ended
        self._told: dict[str, Plan | None] = {}
        self._undo: list[Callable[[], None]] = []
        self.has_switched = False

    # ------------------------------------------------------------------ set-up

    def begin(
        self,
        boundaries: Boundaries,
        device: Device,
        tier: Tier,
        recorder: Recorder,
        footprint: FootprintMeter,
        pipeline_rank: int,
        num_micro_batches: Callable[[], int],
        host_bytes: Callable[[], int],
        take_peak: Callable[[], tuple[int, int]],
        resting: Callable[[], Resting | None] = lambda: None,
        let_rest: Callable[[float], None] = lambda _: None,
        guard: OomGuard | None = None,
    ) -> None:
        """The model is built and its boundaries stand: the first step follows the plan that holds least.

        Args:
            num_micro_batches: of the step that runs.
            host_bytes: what this rank may book for activations.
            take_peak: bytes held at most since the last call, and now; where the device cannot tell what it reserves.
            resting: optimizer state that may rest, and what does now; ``None``: that is not ours to decide.
            let_rest: from now on this part of it rests.
            guard: is on while steps are measured; ``None``: that is not ours to decide.
        """
        self._boundaries = boundaries
        self._device = device
        self._tier = tier
        self._recorder = recorder
        self._timer = recorder.for_times()
        self._undo.append(self._timer.abandon)
        self._footprint = footprint
        self._pipeline_rank = pipeline_rank
        self._get_num_micro_batches = num_micro_batches
        self._host_bytes = host_bytes
        self._take_peak = take_peak
        self._resting = resting
        self._let_rest = let_rest
        self._guard = guard
        self._ranks = Ranks()
        self._clock = StepClock(device)
        self._stages = Stages(
            self._budget_gib, self._make_plans, self._config.max_candidates, self._say, device.keeps_time,
            self._most_telling, SETTLING_STEPS + self._config.optimizer_auto * OVERLAP_STEPS,
        )  # fmt: skip
        self._guard_or_not()
        self._say(f"at most {format_bytes(self._budget_gib * GIB)} of device memory; the first steps are measured")

    def watch(self, chunk: nn.Module) -> None:
        """``chunk`` is one of the model's on this rank."""
        # First of all hooks: what lies between steps leaves nothing when the next one is timed or recorded.
        self._undo.append(chunk.register_forward_pre_hook(self._chunk_begins, prepend=True).remove)
        self._undo.append(self._timer.watch(chunk))

    def _chunk_begins(self, *_: object) -> None:
        if not torch.is_grad_enabled():
            self._is_between_steps = True
            return
        if self._is_between_steps:
            self._is_between_steps = False
            self._step_begins()
        self._clock.begin()
        self._footprint.begin_chunk()
        before, self._num_micro_batches = self._num_micro_batches, self._get_num_micro_batches()
        if self._num_micro_batches != before:
            self._clock.forget()  # else that step's time would be told as this one's
        expected = self._stages.expected
        if expected is not None and min(self._num_micro_batches, self._most_telling) > expected.num_micro_batches:
            self._is_larger()  # a pipeline may hold more of them at once

    def _step_begins(self) -> None:
        """What an evaluation held at most, a checkpoint, or building the model, is not this step's, nor what the
        allocator reserved for it beyond that of steps."""
        if self._reserved_bytes is None:
            self._check_room()
        self._take_peak()
        self._device.take_retries()
        if (self._device.reserved_bytes() or 0) > (self._reserved_bytes or 0):
            self._device.give_back()

    def _check_room(self) -> None:
        """Before the first step. The optimizer stands, too, and as much of its state rests as may.

        Raises:
            UsageError: this rank's device holds more than the budget, and nothing was saved for backward yet.
        """
        held_bytes = self._device.allocated_bytes() or 0
        if held_bytes > self._budget_gib * GIB:
            rest = "" if self._config.optimizer_auto else "let optimizer state rest (--swap-optimizer auto), "
            raise UsageError(
                f"the planner may use {self._budget_gib:g} GiB of device memory, and weights, gradients and optimizer "
                f"state take {format_bytes(held_bytes)} before the first step. Raise --swap-memory-gib or "
                f"--swap-memory-fraction, {rest}or split the model further (--use-distributed-optimizer, "
                "--tensor-model-parallel-size, --pipeline-model-parallel-size)."
            )

    def _is_larger(self) -> None:
        """In a forward: more is saved than is planned for. The rest of the step keeps as little as it can."""
        self.policy.is_short = True

    def tier_is_full(self, error: SwapError) -> None:
        """What is to be swapped has no room, and stays: while steps are measured, or before longer ones are."""
        self._tell_once("tier", f"what has no room outside the device stays on it for now ({error})")

    def _tell_once(self, what: str, line: str) -> None:
        """Of each plan; this rank may be the only one."""
        if self._told.get(what, False) is not self._stages.plan:
            self._told[what] = self._stages.plan
            self._tell([line])

    @property
    def is_measuring(self) -> bool:
        """Whether the next step is recorded or timed, or settles before that: nothing else may run beside it."""
        return self._stages.stage is Stage.PROFILE

    def close(self) -> None:
        """Take it off the model again."""
        while self._undo:
            self._undo.pop()()

    # ------------------------------------------------------------ between steps

    def step_ended(self, number: int, short_bytes: int = 0, num_retries: int = 0) -> None:
        """Step ``number`` is over on this rank, and for its recorder: measure it, agree, decide, switch.

        Args:
            short_bytes: what the device had no room for in it: there is less than the budget allows.
            num_retries: allocations for which the allocator gave back all that it caches. The next ones take it again:
                steps that go on like this are slow, so that counts as short of memory, too.

        Raises:
            Infeasible: no plan fits the budget, and none was made before.
        """
        stages, before, stage, was_timing = self._stages, self._stages.plan, self._stages.stage, self._stages.timing
        self.has_switched = self.policy.is_short
        footprint = self._footprint.take()
        if stages.expected is not None:
            footprint = footprint.filled_from(stages.expected.measured.footprint)
        elif was_timing:
            footprint = footprint.filled_from(self._recorded)
        elif stages.recording:
            self._recorded = self._recorded.or_more(footprint)
        ms = self._clock.end(wait=stage is not Stage.STABLE)
        saved_mib = footprint.num_bytes / MIB
        peak_gib = self._peak_gib()
        is_full = num_retries > 0 and not short_bytes and not self.is_measuring
        if is_full:
            told = f"the device is full: its allocator had to give back what it cached, {num_retries} times in a step"
            self._tell_once("device", f"{told}. That counts as {format_bytes(FULL_BYTES)} above the budget")
        if short_bytes:
            peak_gib = max(peak_gib, self._budget_gib) + short_bytes / GIB
        step = self._ranks.worst(
            Step(
                number, ms, peak_gib, footprint.num_tensors, saved_mib, self._num_micro_batches,
                is_full * FULL_BYTES / GIB,
            )
        )  # fmt: skip
        if self._timer.on:
            self._timer.step_ended(number + 1)
            self._timed.append((step, self._timer.stop()))
        stages.step_ended(step)
        if stages.timing and not was_timing:
            self._begin_timing()
        elif stages.timing:
            self._timer.start(number + 1)
        if self._recorder.on and not stages.recording:
            self._recorder.abandon()
        if stages.plan is not before or (was_timing and not stages.timing):
            self._follow(stages.plan)
        elif self.policy.is_short:
            self.policy.is_short = False
            self._boundaries.follow_policy(self._config.window_bytes(stages.plan))
            self._device.give_back()
        if stages.recording and not self._recorder.on:
            self._recorded = Footprint(())
            self._device.give_back()  # what trials and first uses took tells nothing of what a step needs
            self._recorder.start(number + 1)
        if stages.stage is Stage.STABLE and stages.stage is not stage:
            self._save()
        self._reserved_bytes = self._device.reserved_bytes() or 0
        self._is_between_steps = True
        self._guard_or_not()

    def _guard_or_not(self) -> None:
        if self._guard is None or self._guard.is_on == self.is_measuring:
            return
        if not self.is_measuring:
            self._guard.end()
            return
        try:
            self._guard.begin()
        except UsageError as error:
            self._guard = None
            self._say(f"no out-of-memory guard while the first steps are measured: {error}")

    def _begin_timing(self) -> None:
        """Recorded is enough: from now on layers run as a whole, where that fits on all ranks, and nobody looks."""
        self._untimed, self._timed = self._build_profile(), []
        plan = whole_layers(self._untimed, self._budget_gib)
        if None not in self._ranks.gather(plan):
            self._follow(plan)

    def _follow(self, plan: Plan | None) -> None:
        """The next step follows ``plan``; what the allocator holds for the last one goes back."""
        self.has_switched = True
        self.policy.follow(self._safe if plan is None else PlanPolicy(plan), plan is not None and not moves(plan))
        self._boundaries.follow_policy(self._config.window_bytes(plan))
        if self._config.optimizer_auto:
            self._device.give_back()  # what comes to stay is not to stand among what was the last plan's
            self._let_rest(1.0 if plan is None or plan.resting is None else plan.resting)
        expected = self._stages.expected
        self._footprint.expect(None if expected is None else expected.measured.footprint, 1 + DRIFT, self._is_larger)
        self._clock.forget()
        self._device.give_back()

    def _peak_gib(self) -> float:
        """Most that the device had to hold: what its allocator has reserved, since it gives nothing back in a step."""
        reserved_bytes = self._device.reserved_bytes()
        if reserved_bytes is not None:
            return reserved_bytes / GIB
        return 0.0 if self._recorder.on else self._take_peak()[0] / GIB

    # -------------------------------------------------------------------- plans

    def _make_plans(self, workload: Workload, budget_gib: float) -> list[Plan]:
        """The best plans of the whole model for ``workload``, the same on all ranks.

        Raises:
            Infeasible: some stage has none; the smallest budget is that of all stages.
        """
        if self._untimed is not None:
            timed = [
                recording for step, recording in self._timed
                if step.num_micro_batches == self._untimed.num_micro_batches
                and workload.is_like(replace(step, num_micro_batches=workload.num_micro_batches))
            ]  # fmt: skip
            workload.measured = _Measured(with_times(self._untimed, timed), self._recorded)
            self._untimed = None
        profile: Profile = workload.measured.profile
        of_ranks = self._ranks.gather((self._pipeline_rank, profile))
        leaders: dict[int, int] = {}
        for rank, (stage, one) in enumerate(of_ranks):
            if stage not in leaders or one.num_mib > of_ranks[leaders[stage]][1].num_mib:
                leaders[stage] = rank
        self._leaders = set(leaders.values())
        mine: list[Plan] | tuple[str, float] = []
        if leaders[self._pipeline_rank] == self._ranks.rank:
            try:
                mine = list(solve_shares(profile, budget_gib, self._config.max_candidates).plans)
            except Infeasible as error:
                mine = str(error), error.smallest_gib  # such an exception cannot be sent
        answers = self._ranks.gather(mine)
        of_stages: list[list[Plan]] = []
        refusals: list[tuple[str, float]] = []
        for answer in (answers[leaders[stage]] for stage in sorted(leaders)):
            if isinstance(answer, tuple):
                refusals.append(answer)
            else:
                of_stages.append(answer)
        if refusals:
            raise Infeasible(*max(refusals, key=lambda refusal: refusal[1]))  # enough for one is enough for all
        most = max(len(plans) for plans in of_stages)
        return [merged([plans[min(i, len(plans) - 1)] for plans in of_stages]) for i in range(most)]

    def _build_profile(self) -> Profile:
        recording = self._recorder.stop()
        if self._link is None:
            self._link = slowest_link(self._device, measure_link(self._device, self._tier))
        saving = {entry.layer for entry in self._recorded.layers if entry.num_tensors}  # frozen ones may save nothing
        chunks = tuple(tuple(layer for layer in chunk if layer in saving) for chunk in self._boundaries.chunks())
        profile = build_profile(
            recording,
            self._model,
            self._link,
            profiles.Device(self._device.name, self._device_gib),
            num_micro_batches=self._num_micro_batches,
            source=f"measured in {recording.num_steps} steps of a run with budget {self._budget_gib:g} GiB",
            host_gib=self._host_bytes() / GIB,
            pipeline=Pipeline(self._model.pipeline_parallel, self._pipeline_rank, chunks),
            min_mib=self._config.min_mib,
            whole_layers=True,
        )
        return replace(profile, resting=self._resting())

    def finish(self) -> None:
        """Training is over. Where no plan stands, say so, and write what there is."""
        stages, config = self._stages, self._config
        if stages.has_been_stable:
            return
        files = {"--swap-save-plan": config.save_plan, "--swap-save-profile": config.save_profile}
        flags = " and ".join(flag for flag, path in files.items() if path is not None)
        line = f"training ended before a plan stood, which takes up to {stages.num_steps_needed} steps"
        if stages.expected is not None:
            self._save()
            line += f"; {flags}: written of a plan that was not compared with others" if flags else ""
        elif flags:
            line += f"; {flags}: not written"
        self._say(line)

    def _save(self) -> None:
        """Plan and profile are written as soon as the plan stands: the plan once, the profile of each stage once."""
        workload, config = self._stages.expected, self._config
        assert workload is not None
        plan, profile = self._stages.plan, workload.measured.profile
        plan_path = config.save_plan
        if plan_path is not None and plan is not None and self._ranks.rank == 0:
            _write("--swap-save-plan", lambda: save_plan(plan, plan_path))
        if config.save_profile is not None and self._ranks.rank in self._leaders:
            path = Path(config.save_profile)
            if len(self._leaders) > 1:
                path = path.with_name(f"{path.stem}.stage-{self._pipeline_rank}{path.suffix}")
            _write("--swap-save-profile", lambda: save_profile(profile, path))

    def summary(self) -> dict[str, Any]:
        """What the JSON summary has under ``planning``."""
        stages = self._stages
        plan = stages.plan
        predicted = None if plan is None else plan.predicted
        ends = [one.first_step - 1 for one in stages.history[1:]]
        return {
            "budget_gib": self._budget_gib,
            "predicted_peak_gib": None if predicted is None else predicted.peak_gib,
            "predicted_step_ms": None if predicted is None else predicted.step_ms,
            "profile_sha256": None if plan is None else plan.profile_sha256,
            "num_replans": stages.num_replans,
            "num_infeasible": stages.num_infeasible,
            "stages": [
                {
                    "stage": one.stage.value,
                    "first_step": one.first_step,
                    "last_step": last,
                    "note": one.note,
                    "predicted_peak_gib": one.predicted_peak_gib,
                }
                for one, last in zip_longest(stages.history, ends)
            ],
        }


def _write(flag: str, save: Callable[[], None]) -> None:
    """Training matters more than a file, and so does the next file."""
    try:
        save()
    except OSError as error:
        print(f" swap: {flag} was not written: {error}", file=sys.stderr, flush=True)
