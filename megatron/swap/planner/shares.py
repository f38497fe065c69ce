"""How much of the optimizer's state rests: less leaves activations less memory, more makes the step longer."""

from __future__ import annotations

from dataclasses import replace

from megatron.swap.plan import Infeasible
from megatron.swap.planner.profile import Profile, sha256
from megatron.swap.planner.simulate import MIB_PER_GIB, Prediction
from megatron.swap.planner.solve import Solution, solve

STEPS = 16
"""Parts of what may rest that are told apart."""


def solve_shares(profile: Profile, budget_gib: float, max_plans: int = 3) -> Solution:
    """As ``solve``; where optimizer state may rest its plans say how much is to (``Plan.resting``).

    The time of the best plan falls as more rests, while activations gain from the memory, then grows with the copies:
    the search goes downhill, in ever smaller steps. The lower bound is the least of the parts that were tried.

    Raises:
        Infeasible: nothing fits, with all that may rest at rest.
    """
    if profile.resting is None or not profile.resting.share:
        return solve(profile, budget_gib, max_plans)
    most = profile.resting.share
    found: dict[int, Solution | None] = {STEPS: _at(profile, most, budget_gib, max_plans)}

    def ms(step: int) -> float:
        if step not in found:
            try:
                found[step] = _at(profile, most * step / STEPS, budget_gib, max_plans)
            except Infeasible:
                found[step] = None
        solution = found[step]
        return float("inf") if solution is None else round(solution.prediction.step_ms, 3)

    best, stride = STEPS, STEPS // 2
    while stride:
        near = [step for step in (best - stride, best + stride) if 0 <= step <= STEPS]
        better = min(near, key=lambda step: (ms(step), step), default=best)
        if (ms(better), better) < (ms(best), best):
            best = better
        else:
            stride //= 2
    solution = found[best]
    assert solution is not None
    bound_ms = min(one.lower_bound_ms for one in found.values() if one is not None)
    name = sha256(profile)
    plans = []
    for plan in solution.plans:
        assert plan.predicted is not None
        predicted = replace(plan.predicted, lower_bound_ms=bound_ms)
        plans.append(replace(plan, profile_sha256=name, predicted=predicted))
    return Solution(tuple(plans), solution.predictions, bound_ms)


def with_share(profile: Profile, share: float) -> Profile:
    """``profile`` with another part at rest, copied home at the speed of one direction: coming in overlaps with it.
    The optimizer's kernels, and the disk, run beside the copies of what they step; what stays is stepped by itself."""
    resting = profile.resting
    assert resting is not None
    other = resting.with_share(share)
    link = profile.link
    both_gb_s = min(link.d2h_beside_h2d_gb_s, link.h2d_beside_d2h_gb_s)
    update_ms, measured_share = resting.update_ms, resting.share
    copied_ms = resting.state_gib * measured_share * 2**30 / (both_gb_s * 1e6)
    measured_ms = (1 - measured_share) * update_ms + max(measured_share * update_ms, copied_ms, resting.disk_ms)
    optimizer_ms = max(0.0, profile.outside.optimizer_ms - measured_ms)
    optimizer_ms += (1 - share) * update_ms + max(share * update_ms, _home_ms(profile, share), other.disk_ms)
    return replace(
        profile,
        static_gib=profile.static_gib + (resting.share - share) * resting.state_gib,
        outside=replace(profile.outside, optimizer_ms=optimizer_ms),
        resting=other,
    )


def _at(profile: Profile, share: float, budget_gib: float, max_plans: int) -> Solution:
    """The best plans with ``share`` at rest, their times less what the next forward hides of the copies home."""
    solution = solve(with_share(profile, share), budget_gib, max_plans)
    hidden = [hidden_ms(profile, share, one) for one in solution.predictions]
    predictions = tuple(
        replace(prediction, step_ms=prediction.step_ms - ms)
        for prediction, ms in zip(solution.predictions, hidden, strict=True)
    )
    plans = []
    for plan, prediction in zip(solution.plans, predictions, strict=True):
        assert plan.predicted is not None
        plans.append(replace(plan, resting=share, predicted=replace(plan.predicted, step_ms=prediction.step_ms)))
    most_ms = min(_home_ms(profile, share), _forward_ms(profile))
    return Solution(tuple(plans), predictions, solution.lower_bound_ms - most_ms)


def hidden_ms(profile: Profile, share: float, prediction: Prediction) -> float:
    """Of the copies home: what the next forward leaves of the link when activations have gone out, but no more than
    stands in the memory that activations leave between two steps. The rest comes and goes within the step, which takes
    as long as its kernels, and as the disk, in any case."""
    assert profile.resting is not None
    home_ms = _home_ms(profile, share)
    static_gib = with_share(profile, share).static_gib
    room_gib = max(0.0, prediction.peak_gib - static_gib - profile.outside.peak_gib)
    link = profile.link
    both_gb_s = min(link.d2h_beside_h2d_gb_s, link.h2d_beside_d2h_gb_s)
    within_ms = max(0.0, share * profile.resting.state_gib - room_gib) * 2**30 / (both_gb_s * 1e6)
    seen_ms = max(within_ms, share * profile.resting.update_ms, profile.resting.with_share(share).disk_ms)
    return max(0.0, min(_window_ms(profile, prediction), home_ms - seen_ms))


def _home_ms(profile: Profile, share: float) -> float:
    assert profile.resting is not None
    return share * profile.resting.state_gib * MIB_PER_GIB * profile.out_ms_per_mib


def _forward_ms(profile: Profile) -> float:
    """Of the layers, for one micro-batch."""
    return sum(len(entry.layers) * entry.forward_ms for entry in profile.layers)


def _window_ms(profile: Profile, prediction: Prediction) -> float:
    """What the first forward leaves of the link when activations have gone out."""
    return max(0.0, _forward_ms(profile) - prediction.host_gib * MIB_PER_GIB * profile.out_ms_per_mib)
