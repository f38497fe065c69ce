"""Chooses the fraction of optimizer state to offload, which frees memory for activations and lengthens the step."""

from dataclasses import replace

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import GIB
from megatron.swap.planner.profile import BUCKETS_GIB, OffloadedState, Profile, sha256
from megatron.swap.planner.simulate import MIB_PER_GIB
from megatron.swap.planner.solve import Solution, solve

STEPS = 16  # of the search: fractions are multiples of 1/16 of the maximum


def solve_fractions(
    profile: Profile, budget_gib: float, max_plans: int = 3, reserve_gib: float | None = None
) -> Solution:
    """Solve as ``solve`` does, and choose ``Plan.offload_fraction`` if the planner decides on optimizer state.

    The lower bound is the least of all fractions that were tried. Raises ``Infeasible`` if no plan fits, neither with
    the maximum offloaded nor with nothing.
    """

    def at(fraction: float) -> Solution:
        solution = solve(with_fraction(profile, fraction), budget_gib, max_plans, reserve_gib)
        return replace(solution, plans=tuple(replace(plan, offload_fraction=fraction) for plan in solution.plans))

    state = profile.offloaded_state
    if state is None or not state.fraction:
        return solve(profile, budget_gib, max_plans, reserve_gib)
    if state.is_fixed:
        return at(state.fraction)
    most = state.fraction
    try:
        found: dict[int, Solution | None] = {STEPS: at(most)}
    except Infeasible as error:
        try:
            solution = at(0.0)  # the buckets of the maximum may leave larger gaps
        except Infeasible as other:
            raise min(error, other, key=lambda one: one.smallest_gib) from None
        return _named(profile, solution, solution.lower_bound_ms)

    def ms(step: int) -> float:
        if step not in found:
            try:
                found[step] = at(most * step / STEPS)
            except Infeasible:
                found[step] = None
        tried = found[step]
        return float("inf") if tried is None else round(tried.prediction.step_ms, 3)

    # As more state is offloaded, the best step time first falls, since activations get the memory, and then grows with
    # the copies. So the search descends from the maximum in ever smaller steps.
    best, stride = STEPS, STEPS // 2
    while stride:
        near = [step for step in (best - stride, best + stride) if 0 <= step <= STEPS]
        better = min(near, key=lambda step: (ms(step), step), default=best)
        if (ms(better), better) < (ms(best), best):
            best = better
        else:
            stride //= 2
    best = min((best, 0), key=lambda step: (ms(step), step))  # without buckets there are fewer fragments
    chosen = found[best]
    assert chosen is not None
    return _named(profile, chosen, min(one.lower_bound_ms for one in found.values() if one is not None))


def with_fraction(profile: Profile, fraction: float) -> Profile:
    """Return ``profile`` as if ``fraction`` of the optimizer's state was offloaded."""
    state = profile.offloaded_state
    assert state is not None, "the planner does not decide on optimizer state"
    other = state.with_fraction(fraction)
    update_ms, measured_fraction = state.update_ms, state.fraction
    # Of offloaded state the copies, the optimizer's kernels and the disk overlap, so the slowest counts. Kernels for
    # state on the device do not overlap, nor does a second copy for parameters in 8 bits.
    slower_gb_s = min(profile.link.d2h_beside_h2d_gb_s, profile.link.h2d_beside_d2h_gb_s)
    copied_ms = state.state_gib * measured_fraction * GIB / (slower_gb_s * 1e6)
    measured_ms = (1 - measured_fraction) * update_ms + max(measured_fraction * update_ms, copied_ms, state.disk_ms)
    requantized_ms = state.requantized_gib * MIB_PER_GIB * profile.in_ms_per_mib
    measured_ms += measured_fraction * requantized_ms
    optimizer_ms = max(0.0, profile.non_layer.optimizer_ms - measured_ms)
    # Offloads take the time of one direction, since reloads overlap with them. Beside the next forward they gain
    # nothing: in all measured runs each offloaded GiB lengthened the step by its copy (docs/dev/planner.md).
    copy_ms = _offload_ms(profile, state, fraction)
    buckets_gib = 0.0 if fraction or not measured_fraction else BUCKETS_GIB
    optimizer_ms += (1 - fraction) * update_ms + max(fraction * update_ms, copy_ms, other.disk_ms)
    optimizer_ms += fraction * requantized_ms
    host_gib = profile.host_gib
    # In a profile by arithmetic activations get the host memory that less state leaves. A measured run has reserved
    # that memory already.
    if host_gib is not None and profile.allocator_gib is None:
        host_gib += (state.fraction - fraction) * state.state_gib - (state.disk_gib - other.disk_gib)
    return replace(
        profile, host_gib=host_gib, static_gib=profile.static_gib + (state.fraction - fraction) * state.state_gib,
        non_layer=replace(profile.non_layer, optimizer_ms=optimizer_ms),
        optimizer_gib=max(0.0, profile.optimizer_gib - buckets_gib), offloaded_state=other,
    )  # fmt: skip


def _named(profile: Profile, solution: Solution, bound_ms: float) -> Solution:
    """Return ``solution`` with plans that name ``profile`` and the lower bound of all fractions."""
    name = sha256(profile)
    plans = []
    for plan in solution.plans:
        assert plan.predicted is not None
        predicted = replace(plan.predicted, lower_bound_ms=bound_ms)
        plans.append(replace(plan, profile_sha256=name, predicted=predicted))
    return Solution(tuple(plans), solution.predictions, bound_ms)


def copies_ms(profile: Profile) -> float:
    """Return the ms that copies of the offloaded state take in a step, on the link or the disk."""
    state = profile.offloaded_state
    return 0.0 if state is None else max(_offload_ms(profile, state, state.fraction), state.disk_ms)


def _offload_ms(profile: Profile, state: OffloadedState, fraction: float) -> float:
    return fraction * state.state_gib * MIB_PER_GIB * profile.out_ms_per_mib
