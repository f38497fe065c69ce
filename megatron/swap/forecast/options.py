"""The ways to make a model fit: nothing, full recomputation, a plan, offloaded optimizer state, a disk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.swap.common.layer_ranges import format_ranges
from megatron.swap.common.plan import DROPPED, LAYER_SECTION, Infeasible, Plan, PlanClass
from megatron.swap.common.types import GIB, MIB, UsageError
from megatron.swap.forecast.flags import Training
from megatron.swap.forecast.fp8 import fp8_params, with_fp8_weights
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.forecast.kernels import BYTES
from megatron.swap.forecast.shape import chunks_of, params_of_rank, shape_profile, with_megatrons_loss
from megatron.swap.forecast.states import States, max_offloaded_state_gib, max_state_before_disk, split_before_disk
from megatron.swap.planner.profile import Profile
from megatron.swap.planner.simulate import Prediction, simulate
from megatron.swap.planner.solve import (
    MAX_TIGHTENINGS,
    MAX_WIDENINGS,
    WIDENED_GAIN,
    Solution,
    empty_plan,
    written_budget,
)
from megatron.swap.planner.state_fraction import solve_fractions, with_fraction

NOTHING, FULL, PLANNED, STATE, DISK = (
    "nothing", "full recomputation", "planned", "planned + optimizer state", "planned + optimizer state + disk",
)  # fmt: skip
"""The options, the simplest first."""
CHECKPOINTING = "checkpointing"  # full recomputation by the model itself, where it is not Megatron's
FULL_FLAGS = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
NEAR = 1.02  # a simpler option is preferred if its step takes at most this times the fastest
WORTH = 0.995  # FP8 copies of weights are dropped if a step then takes at most this times as long
LAYERS_AHEAD = 20
"""Layers that the host is ahead of the GPU: CUDA queues 1,024 kernels, a layer has about 50 (docs/dev/planner.md)."""


@dataclass(frozen=True)
class Option:
    """A way to train, with its prediction for a rank. Host and disk GiB are of activations and optimizer state."""

    name: str
    flags: tuple[str, ...]  # of the training command, without the budget
    profile: Profile  # the step that the plan was made from
    device_gib: float  # the device's peak of reserved memory; if no plan fits, the smallest feasible budget
    host_gib: float
    disk_gib: float
    fits: bool
    prediction: Prediction | None  # None: no plan fits
    solution: Solution | None = None  # None: no plan fits, or the option needs no planner
    states: States | None = None  # storage of weights, gradients and state; None: a profile does not say

    @property
    def needed_gib(self) -> float:
        """The smallest budget that was found feasible, rounded up; at most the given one if a plan fits."""
        if self.prediction is None or self.solution is not None:
            return self.device_gib
        return float(written_budget(self.device_gib))

    @property
    def is_planned(self) -> bool:
        """Whether Megatron Swap has a part in it."""
        return self.name not in (NOTHING, FULL, CHECKPOINTING)

    @property
    def predicted_profile(self) -> Profile:
        """The predicted step: with its fragments and its fraction of optimizer state offloaded."""
        if self.solution is None and self.prediction is not None:
            more_gib = self.device_gib - self.prediction.peak_gib
            return replace(self.profile, allocator_gib=self.profile.fragments_gib + more_gib)
        fraction = None if self.solution is None else self.solution.plan.offload_fraction
        return self.profile if fraction is None else with_fraction(self.profile, fraction)


def states_on(training: Training, gpu: Gpu, pipeline_rank: int = 0) -> States:
    """Return the storage of a rank's weights, gradients and state on ``gpu``, with the FP8 copies of its weights."""
    model, states = training.model, training.states
    num_fp8 = fp8_params(model, tuple(layer for chunk in chunks_of(model, pipeline_rank) for layer in chunk))
    params = params_of_rank(model, training.tied, pipeline_rank)
    return with_fp8_weights(states, gpu, num_fp8, params)


def of_training(
    training: Training, gpu: Gpu, budget_gib: float, host_gib: float | None, pipeline_rank: int = 0,
    disk_dir: str = "/tmp", link_gb_s: float | None = None,
) -> list[Option]:  # fmt: skip
    """Return the options of a run that its flags describe, the simplest first, or raise ``UsageError``.

    ``--swap-optimizer`` among the flags fixes the fraction of optimizer state that the last two options offload.
    Without flags the planner decides, also whether linear layers in FP8 keep copies of their weights. A step may
    reserve ``budget_gib`` of the device. Without ``host_gib`` host memory has no limit, so that no disk is needed.
    """
    limits = budget_gib, host_gib, pipeline_rank, disk_dir
    if link_gb_s is not None:
        gpu = replace(gpu, link_gb_s=link_gb_s, link_both_gb_s=link_gb_s)
    found = _of_training(training, gpu, *limits)
    if not training.may_drop_copies:
        return found
    without = _of_training(replace(training, model=replace(training.model, swap_fp8_weights=DROPPED)), gpu, *limits)
    pairs = zip(found, without, strict=True)
    return [_faster(one, other) if one.is_planned else one for one, other in pairs]


def _of_training(
    training: Training, gpu: Gpu, budget_gib: float, host_gib: float | None, pipeline_rank: int, disk_dir: str
) -> list[Option]:
    """Return the options of a run whose layers keep copies of their weights, or not, as its model says."""
    params = params_of_rank(training.model, training.tied, pipeline_rank)
    training = replace(training, states=states_on(training, gpu, pipeline_rank))
    kept = replace(training.states, offload_fraction=0.0, is_auto=False)
    state_gib = kept.state_gib(params)

    def profile_of(states: States, room_gib: float | None, on_disk_gib: float = 0.0) -> Profile:
        return shape_profile(
            training.model, gpu, training.num_micro_batches, tied=training.tied, states=states,
            pipeline_rank=pipeline_rank, host_gib=room_gib, state_on_disk_gib=on_disk_gib,
            loss_chunks=training.num_loss_chunks, has_sum_in_loss=training.has_sum_in_loss,
            fuses_gradients=training.fuses_gradients, has_dropout=training.has_dropout,
        )  # fmt: skip

    def offloading(disk_gib: float) -> tuple[States, Profile]:
        """Return storage and step of a run that offloads optimizer state. ``disk_gib``: 0 if there is no disk."""
        states = training.states if training.offloads else replace(kept, offload_fraction=1.0, is_auto=True)
        if host_gib is None:
            return states, profile_of(states, None)
        if states.is_auto:
            most_gib = max_offloaded_state_gib(host_gib, disk_gib)
            states = replace(states, offload_fraction=min(states.offload_fraction, most_gib / state_gib))
        offloaded_gib = states.offloaded_gib(params)
        if offloaded_gib > host_gib and not disk_gib:
            raise UsageError(
                f"the offloaded optimizer state takes {offloaded_gib:.2f} GiB, host memory has {host_gib:g} GiB for "
                "this rank"
            )
        room_gib = max(0.0, host_gib - min(offloaded_gib, max_state_before_disk(host_gib, disk_gib)))
        on_disk_gib = split_before_disk(offloaded_gib, host_gib, room_gib).state_on_disk if disk_gib else 0.0
        return states, profile_of(states, room_gib, on_disk_gib)

    gradients_gib = weight_gradients_gib(training, params)
    unswapped = profile_of(kept, None)
    if training.loss_chunks is None:
        unswapped = with_megatrons_loss(unswapped)
    found = without_planner(unswapped, budget_gib, kept, gradients_gib)
    found.append(_planned(PLANNED, (), profile_of(kept, host_gib), budget_gib, host_gib, kept))
    if training.state_stays is not None:
        return found
    fraction = "auto" if not training.offloads or training.states.is_auto else f"{training.states.offload_fraction:g}"
    flags: tuple[str, ...] = ("--swap-optimizer", fraction)
    for name, disk_gib in ((STATE, 0.0), (DISK, training.disk_gib or float("inf"))):
        if name == DISK and training.avoids_disk is not None:
            break
        if name == DISK and found[-1].name == STATE and found[-1].fits and not training.disk_gib:
            found.append(replace(found[-1], name=name, flags=flags))  # host memory holds all
            break
        try:
            states, profile = offloading(disk_gib)
            option = _planned(name, flags, profile, budget_gib, host_gib, states, has_disk=disk_gib > 0)
            # A given fraction must be offloaded, so that option cannot equal a plan without it.
            found.append(_at_least(option, found[-1]) if states.is_auto or found[-1].name == STATE else option)
        except UsageError:
            pass  # a given fraction that needs the disk
        flags = (*flags, "--swap-disk-dir", disk_dir)
    return found


def of_profile(profile: Profile, budget_gib: float) -> list[Option]:
    """Return the options of a measured run, the simplest first."""
    name = STATE if profile.offloaded_state else PLANNED
    flags = ("--swap-optimizer", "auto") if profile.offloaded_state else ()
    kept = profile if profile.offloaded_state is None else with_fraction(profile, 0.0)
    found = without_planner(replace(kept, offloaded_state=None), budget_gib, None, 0.0)
    return [*found, _planned(name, flags, profile, budget_gib, profile.host_gib, None)]


def of_dry_run(
    profile: Profile, budget_gib: float, without_swapping: Sequence[tuple[str, tuple[str, ...], float, float]],
    reserved_of: Callable[[Plan], float],
) -> list[Option]:  # fmt: skip
    """Return the options of a model whose steps ran dry, the simplest first; the last one is planned.

    ``without_swapping`` has name, calls of a script, ms of a step and reserved GiB of each way to train without
    Megatron Swap, first that of ``profile``. ``reserved_of`` returns the GiB that steps under a plan reserve.
    """
    kept, (_, _, least_ms, _) = simulate(profile, empty_plan(profile)), without_swapping[0]
    found = []
    for name, flags, ms, gib in without_swapping:
        prediction = replace(kept, step_ms=ms, peak_gib=gib, peak_at="reserved", recompute_ms=max(0.0, ms - least_ms))
        found.append(Option(name, flags, profile, gib, 0.0, 0.0, gib <= budget_gib, prediction))
    return [*found, _tried(profile, budget_gib, reserved_of)]


def _tried(profile: Profile, budget_gib: float, reserved_of: Callable[[Plan], float]) -> Option:
    """Return the plan that a run with ``budget_gib`` would choose, with the memory that its steps reserve."""

    def planned(reserve_gib: float | None) -> Option:
        return _planned(PLANNED, (), profile, budget_gib, profile.host_gib, None, reserve_gib=reserve_gib)

    option = planned(None)
    if option.prediction is None:  # its fragments may be fewer than those of the profile
        option = planned(budget_gib - option.device_gib + profile.reserves_gib[-1])
    chosen: Option | None = None
    chosen_gib, chosen_ms, too_high_gib, least_gib = 0.0, float("inf"), float("inf"), float("inf")
    num_wider = num_tighter = 0
    # The profile has the fragments of a single step, and each plan leaves others. As in a run, further plans are tried
    # for memory that a plan leaves free, halfway to its end, as long as they are expected to be faster.
    while option.prediction is not None and option.solution is not None:
        prediction, gib = option.prediction, reserved_of(option.solution.plan)
        predicted_gib, least_gib = prediction.peak_gib, min(least_gib, gib)
        if gib <= budget_gib:
            fragments_gib = prediction.fragments_gib + gib - predicted_gib
            prediction = replace(prediction, peak_gib=gib, fragments_gib=fragments_gib)
            chosen = replace(option, device_gib=gib, prediction=prediction)
            chosen_gib, chosen_ms = predicted_gib, prediction.step_ms
        else:
            too_high_gib = min(too_high_gib, predicted_gib)
        next_gib = predicted_gib + budget_gib - gib
        num_tighter, num_wider = num_tighter + (chosen is None), num_wider + (chosen is not None)
        if num_tighter > MAX_TIGHTENINGS or num_wider > MAX_WIDENINGS:
            break
        if chosen is not None:
            next_gib = (chosen_gib + min(chosen_gib + budget_gib - chosen.device_gib, too_high_gib)) / 2
        option = planned(budget_gib - next_gib)
        if option.prediction is not None and option.prediction.step_ms > chosen_ms:  # the solver has missed one
            option = planned(budget_gib - (chosen_gib + option.prediction.peak_gib) / 2)
        if option.prediction is None or option.prediction.step_ms > (1 - WIDENED_GAIN) * chosen_ms:
            break
    needed_gib = option.device_gib if least_gib == float("inf") else float(written_budget(least_gib))
    return chosen or replace(option, device_gib=needed_gib, fits=False, prediction=None, solution=None)


def weight_gradients_gib(training: Training, num_params: float) -> float:
    """Return the 16-bit gradients of the rank's weights: none where layers add to ``main_grad`` themselves."""
    return 0.0 if training.fuses_gradients else BYTES * num_params / GIB


def without_planner(profile: Profile, budget_gib: float, states: States | None, gradients_gib: float) -> list[Option]:
    """Return the options without Megatron Swap: nothing, and Megatron's full recomputation if the profile knows it."""
    recomputed = tuple(
        PlanClass(format_ranges(entry.layers), {}, (LAYER_SECTION,))
        for entry in profile.layers if any(part.name == LAYER_SECTION for part in entry.sections)
    )  # fmt: skip
    plans: list[tuple[str, tuple[str, ...], Plan]] = [(NOTHING, (), empty_plan(profile))]
    if recomputed and len(recomputed) == len(profile.layers):
        plans.append((FULL, FULL_FLAGS, Plan(profile.model, None, None, None, recomputed)))
    found = []
    for name, flags, plan in plans:
        prediction = simulate(profile, plan)
        reserved_gib = _reserved_gib(profile, prediction, gradients_gib)
        fits = reserved_gib <= budget_gib
        found.append(Option(name, flags, profile, reserved_gib, 0.0, 0.0, fits, prediction, states=states))
    return found


def _reserved_gib(profile: Profile, prediction: Prediction, gradients_gib: float) -> float:
    """Return the device memory that the allocator reserves in a step of Megatron alone."""
    if not profile.layers:
        return prediction.peak_gib
    num_layers = sum(len(entry.layers) for entry in profile.layers)
    # Megatron accumulates weight gradients on a side stream. The allocator reuses their memory only when an event has
    # passed on the GPU (``megatron_lm/accumulators.py``), and the host is ahead. So gradients of earlier micro-batches
    # add to the peak, and those of all micro-batches to the step's last backward.
    ahead = LAYERS_AHEAD / num_layers
    last_mib = max(
        entry.saved_mib + max((mib for _, mib in entry.temporaries), default=0.0) for entry in profile.layers
    )
    last_gib = profile.static_gib + profile.fragments_gib + last_mib * MIB / GIB
    return max(
        prediction.peak_gib + gradients_gib * min(profile.num_micro_batches - 1, ahead),
        last_gib + gradients_gib * min(profile.num_micro_batches, ahead),
    )


def _planned(
    name: str, flags: tuple[str, ...], profile: Profile, budget_gib: float, host_gib: float | None,
    states: States | None, has_disk: bool = False, reserve_gib: float | None = None,
) -> Option:  # fmt: skip
    try:
        solution = solve_fractions(profile, budget_gib, reserve_gib=reserve_gib)
    except Infeasible as error:
        return Option(name, flags, profile, error.smallest_gib, 0.0, 0.0, False, None, states=states)
    prediction, fraction = solution.prediction, solution.plan.offload_fraction
    state = profile.offloaded_state
    offloaded_gib = 0.0
    if state is not None and fraction is not None:
        states = None if states is None else replace(states, offload_fraction=fraction)
        offloaded_gib = fraction * state.state_gib
    before_disk_gib = host_gib if has_disk and host_gib is not None else float("inf")
    split = split_before_disk(offloaded_gib, before_disk_gib, prediction.host_gib)
    buffers_gib = split.buffers if has_disk else 0.0
    return Option(
        name, flags, profile, prediction.peak_gib, split.state_in_host + split.activations_in_host + buffers_gib,
        split.state_on_disk + split.activations_on_disk, True, prediction, solution, states,
    )  # fmt: skip


def _faster(option: Option, without: Option) -> Option:
    """Return ``option``, or the same ``without`` FP8 copies of weights if that is worth it, or alone fits."""
    without = replace(without, flags=(*without.flags, "--swap-fp8-weights", DROPPED))
    if option.prediction is None or without.prediction is None:
        return without if without.fits or (not option.fits and without.needed_gib < option.needed_gib) else option
    return without if without.prediction.step_ms < WORTH * option.prediction.step_ms else option


def _at_least(option: Option, simpler: Option) -> Option:
    """Return ``option``, or ``simpler`` under its name if that alone fits or needs less."""
    if option.fits or not (simpler.fits or simpler.needed_gib < option.needed_gib):
        return option
    return replace(simpler, name=option.name, flags=option.flags)


def best(found: Sequence[Option], is_disk_given: bool = False) -> Option | None:
    """Return the fastest option that fits, or a simpler option that is nearly as fast, or None."""
    fitting = [(one, one.prediction.step_ms) for one in found if one.fits and one.prediction is not None]
    if not is_disk_given:  # without a disk of the user's, a disk is chosen only if nothing else fits
        fitting = [pair for pair in fitting if pair[0].name != DISK] or fitting
    least_ms = min((ms for _, ms in fitting), default=0.0)
    return next((one for one, ms in fitting if ms <= NEAR * least_ms), None)
