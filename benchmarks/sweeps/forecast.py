"""Predict the memory of a run on each tier (device, host, disk) with the planner's memory model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks.runner.planning import last_value, plan_file, searches
from benchmarks.sweeps.plans import plan_of, with_mlp_section
from megatron.swap.common.plan import Infeasible, load_plan
from megatron.swap.common.settings import USUAL_FRACTION
from megatron.swap.common.types import GIB, UsageError, format_bytes
from megatron.swap.forecast.flags import Training, read_flags
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.forecast.options import states_on
from megatron.swap.forecast.shape import WORKSPACE_GIB, params_of_rank, shape_profile, with_megatrons_loss
from megatron.swap.forecast.states import max_offloaded_state_gib, split_before_disk
from megatron.swap.planner.profile import Profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.state_fraction import solve_fractions

MARGIN = 0.05
"""Safety margin as a fraction of a tier. A search begins where at least this fraction is predicted to stay free; a run
that is predicted to exceed the tier by more than this fraction is not tried. Prediction errors were up to 3 % with
activations alone and up to 4 % with offloaded optimizer state; CUDA's own memory is not counted."""

CUDA_GIB = 2.8
"""Device memory that CUDA and its libraries take: PyTorch's allocator got 137.0 GiB of an H200's 139.8 GiB."""


@dataclass(frozen=True)
class Tiers:
    """GiB of each tier that a run may use. `device`: `None` without a GPU, where host memory takes its place."""

    device: float | None
    host: float
    disk: float


@dataclass(frozen=True)
class Need:
    """Predicted use of one tier and its limit, in GiB. A planned run works with ``least_gib``, and uses more."""

    tier: str
    gib: float
    limit_gib: float
    whose: str
    least_gib: float | None = None
    margin: float = MARGIN

    @property
    def text(self) -> str:
        needed, there = (format_bytes(round(gib * GIB)) for gib in (self.gib, self.limit_gib))
        return f"{needed} of {self.tier} memory, {there} are there ({self.whose})"


@dataclass(frozen=True)
class Forecast:
    """The prediction for one run. ``is_bound``: only a lower bound; activations are not known."""

    needs: tuple[Need, ...]
    static_gib: float
    is_bound: bool

    @property
    def fits(self) -> bool:
        """Return whether the run fits with a margin. A lower bound has no margin, since it is no prediction anyway."""
        return all(
            (need.gib if need.least_gib is None else need.least_gib)
            <= (1.0 if self.is_bound else 1 - need.margin) * need.limit_gib
            for need in self.needs
        )

    @property
    def fullness(self) -> float:
        rooms = [(need.gib, need.limit_gib - CUDA_GIB * (need.tier == "device")) for need in self.needs]
        return max(gib / room if room > 0 else math.inf for gib, room in rooms if gib > 0)

    @property
    def excess(self) -> Need | None:
        room = 1.0 if self.is_bound else 1 + MARGIN
        return next((need for need in self.needs if need.gib > room * need.limit_gib), None)

    def of(self, tier: str) -> float | None:
        return max((need.gib for need in self.needs if need.tier == tier), default=None)

    def as_row(self) -> dict[str, float | bool | None]:
        return {
            **{f"{tier}_gib": self.of(tier) for tier in ("device", "host", "disk")},
            "static_gib": self.static_gib, "is_bound": self.is_bound,
        }  # fmt: skip


def forecast(flags: Sequence[str], tiers: Tiers, gpu: Gpu | None, *, by_flags: bool = True) -> Forecast:
    """Predict the memory of a run. ``by_flags``: false where a baseline wraps the model."""
    flags = _apart(flags)
    training = read_flags(flags)
    states = training.states if gpu is None else states_on(training, gpu)
    offloaded, room = _offloaded(flags), room_of(flags, tiers)
    if offloaded:
        # Kept state is in fp32 as well, and offloaded gradients have a copy.
        states = replace(states, offload_fraction=offloaded, state_bytes=12 if states.gradient_bytes == 4 else 16)
    params = params_of_rank(training.model, training.tied)
    if states.is_auto:
        states = replace(states, offload_fraction=_auto_fraction(flags, states.state_gib(params), room))
    static_gib, offloaded_gib = states.device_gib(params), states.offloaded_gib(params)
    known = None
    if gpu is not None and tiers.device is not None and by_flags:
        room_gib, of_gpu = max(0.0, room.host - offloaded_gib), replace(gpu, memory_gib=tiers.device)
        known = _activations(flags, replace(training, states=states), of_gpu, room_gib, in_buckets=not offloaded)
    peak_gib, moved_gib = (known.peak_gib, known.moved_gib) if known else (static_gib, 0.0)

    needs = []
    if tiers.device is not None:
        limit_gib = min(known.budget_gib, tiers.device) if known else tiers.device
        whose = "the device's" if limit_gib >= tiers.device else "its budget"
        least_gib, margin = (known.least_gib, known.margin) if known else (None, MARGIN)
        needs.append(Need("device", peak_gib, limit_gib, whose, least_gib, margin))
    if "--swap-disk-dir" in flags:
        split = split_before_disk(offloaded_gib, room.host, moved_gib)
        disk_gib = split.state_on_disk + split.activations_on_disk
        needs += [
            Need("disk", disk_gib, room.disk, "free, or --swap-disk-gib"),
            Need("host", split.state_in_host + split.activations_in_host, math.inf, "the rest goes to disk"),
        ]
        offloaded_gib = split.state_in_host
    else:
        whose = "the machine's" if room.host >= tiers.host else "--swap-host-gib"
        plans = known is not None and known.least_gib is not None
        least_gib, margin = offloaded_gib if plans else None, known.margin if known else MARGIN
        needs.append(Need("host", offloaded_gib + moved_gib, room.host, whose, least_gib, margin))
    if tiers.device is None:
        needs.append(Need("host", static_gib + offloaded_gib, tiers.host, "the machine's, which has no device"))
    return Forecast(tuple(needs), static_gib, is_bound=known is None and tiers.device is not None)


def _auto_fraction(flags: Sequence[str], state_gib: float, room: Tiers) -> float:
    path = plan_file(tuple(flags))
    fraction = None if path is None else load_plan(path).offload_fraction
    if fraction is not None:
        return fraction
    return min(1.0, max_offloaded_state_gib(room.host, room.disk) / state_gib)


@dataclass(frozen=True)
class _Known:
    """Device peak, offloaded bytes, device budget and `Need.least_gib`, all in GiB; and `Need.margin`."""

    peak_gib: float
    moved_gib: float
    budget_gib: float
    least_gib: float | None = None
    margin: float = MARGIN


def _activations(
    flags: Sequence[str], training: Training, gpu: Gpu, host_gib: float, *, in_buckets: bool
) -> _Known | None:
    """Predict the device's peak with activations; `None`: the memory model does not cover the run."""
    states, params = training.states, params_of_rank(training.model, training.tied)
    static_gib = states.device_gib(params) + WORKSPACE_GIB
    in_buckets = in_buckets and states.offload_fraction > 0
    least_gib = static_gib + (states if in_buckets else replace(states, offload_fraction=0.0)).optimizer_gib(params)
    if searches(tuple(flags)):
        return _searched(flags, training, gpu, host_gib, least_gib)
    found = _beyond_static(tuple(_without(flags, "--swap-optimizer")), gpu, in_buckets)
    if found is None:
        return None
    more_gib, moved_gib = found
    margin = MARGIN if plan_file(tuple(flags)) is None else 0.0
    return _Known(max(static_gib + more_gib, least_gib), moved_gib, gpu.memory_gib, margin=margin)


def _searched(
    flags: Sequence[str], training: Training, gpu: Gpu, host_gib: float, least_gib: float
) -> _Known | None:
    try:
        profile = shape_profile(
            training.model, gpu, training.num_micro_batches, tied=training.tied, states=training.states,
            host_gib=host_gib, fuses_gradients=training.fuses_gradients, loss_chunks=training.num_loss_chunks,
            has_sum_in_loss=training.has_sum_in_loss,
        )  # fmt: skip
    except UsageError:
        return None  # layers that the formulas do not know
    fraction = _number(flags, "--swap-memory-fraction", USUAL_FRACTION)
    budget_gib = _number(flags, "--swap-memory-gib", fraction * gpu.memory_gib)
    lowest_gib = max(least_gib, _lowest_gib(profile))
    try:
        prediction = solve_fractions(profile, budget_gib, 1).prediction
    except Infeasible:
        return _Known(lowest_gib, 0.0, budget_gib)
    return _Known(max(prediction.peak_gib, least_gib), prediction.host_gib, budget_gib, lowest_gib)


def _lowest_gib(profile: Profile) -> float:
    try:
        return solve_fractions(profile, 0.0, 1).prediction.peak_gib
    except Infeasible as error:
        return error.smallest_gib


@cache
def _beyond_static(flags: tuple[str, ...], gpu: Gpu, in_buckets: bool) -> tuple[float, float] | None:
    """Return the GiB of activations on the device and in host memory, whatever part of the state is offloaded."""
    training, path = read_flags(flags), plan_file(flags)
    try:
        profile = shape_profile(
            training.model, gpu, training.num_micro_batches, tied=training.tied,
            fuses_gradients=training.fuses_gradients, loss_chunks=training.num_loss_chunks,
            has_sum_in_loss=training.has_sum_in_loss,
        )  # fmt: skip
        profile = replace(profile, allocator_gib=0.0)
        plan = plan_of(training.model, flags) if path is None else load_plan(path)
    except UsageError:
        return None
    if plan is None or plan.model != training.model:
        return None
    is_ours = in_buckets or path is not None or last_value(flags, "--swap-layers") not in (None, "none")
    prediction = simulate(with_mlp_section(profile if is_ours else with_megatrons_loss(profile)), plan)
    return prediction.peak_gib - profile.static_gib, prediction.host_gib


def _without(flags: Sequence[str], flag: str) -> list[str]:
    words = list(flags)
    while flag in words:
        at = words.index(flag)
        del words[at : at + 2]
    return words


def _offloaded(flags: Sequence[str]) -> float:
    return _number(flags, "--optimizer-offload-fraction", 1.0) if "--optimizer-cpu-offload" in flags else 0.0


def _number(flags: Sequence[str], flag: str, default: float) -> float:
    value = last_value(flags, flag)
    try:
        return default if value is None else float(value)
    except ValueError as error:
        raise UsageError(f"{flag} {value}: a number is expected") from error


def _apart(flags: Sequence[str]) -> list[str]:
    return [part for word in flags for part in (word.split("=", 1) if word.startswith("--") else [word])]


def room_of(flags: Sequence[str], tiers: Tiers) -> Tiers:
    flags = _apart(flags)
    host_gib = min(tiers.host, _number(flags, "--swap-host-gib", tiers.host))
    disk_gib = min(tiers.disk, disk_limit_gib(flags)) if "--swap-disk-dir" in flags else 0.0
    return Tiers(tiers.device, host_gib, disk_gib)


def disk_folder(flags: Sequence[str]) -> Path | None:
    folder = last_value(_apart(flags), "--swap-disk-dir")
    return None if folder is None else Path(folder)


def disk_limit_gib(flags: Sequence[str]) -> float:
    return _number(_apart(flags), "--swap-disk-gib", math.inf)
