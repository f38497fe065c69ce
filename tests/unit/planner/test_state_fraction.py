"""The fraction of offloaded optimizer state: no more than the budget requires, with the shortest step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron.swap.common.plan import Infeasible, merged
from megatron.swap.common.types import GIB, UsageError
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.forecast.shape import shape_profile
from megatron.swap.planner.profile import Profile, save_profile, sha256
from megatron.swap.planner.solve import smallest_budget, solve
from megatron.swap.planner.state_fraction import STEPS, solve_fractions, with_fraction
from tests.sizes import sized

FLAGS = [
    "--num-layers", "8", "--hidden-size", "4096", "--ffn-hidden-size", "14336", "--num-attention-heads", "32",
    "--group-query-attention", "--num-query-groups", "8", "--swiglu", "--seq-length", "8192",
    "--micro-batch-size", "1", "--global-batch-size", "16", "--vocab-size", "128256", "--bf16",
    "--untie-embeddings-and-output-weights", "--use-distributed-optimizer", "--use-precision-aware-optimizer",
]  # fmt: skip


def of_flags(*more: str) -> Profile:
    training = read_flags([*FLAGS, *more])
    return replace(shape_profile(
        training.model, find_gpu("h200"), training.num_micro_batches, tied=training.tied, states=training.states,
    ), allocator_gib=0.0)  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Profile:
    return of_flags("--swap-optimizer", "auto")


@pytest.mark.parametrize("budget_gib", [38, 30][: sized(2, 1)])
def test_as_good_as_the_best_of_all_fractions(profile: Profile, budget_gib: float) -> None:
    best_ms = float("inf")
    for step in range(STEPS + 1):
        part = with_fraction(profile, step / STEPS)
        single = replace(part, offloaded_state=None)
        try:
            found = solve(single, budget_gib)
        except Infeasible:
            continue
        best_ms = min(best_ms, found.prediction.step_ms)
    answer = solve_fractions(profile, budget_gib)
    assert answer.prediction.step_ms <= 1.002 * best_ms
    assert answer.prediction.peak_gib <= budget_gib
    assert answer.plan.predicted is not None
    assert answer.plan.predicted.step_ms == answer.prediction.step_ms
    assert answer.plan.profile_sha256 == sha256(profile)


def test_activations_get_the_host_memory_that_less_state_leaves(profile: Profile) -> None:
    """By arithmetic. A run that was measured has reserved the memory of the largest fraction."""
    state = profile.offloaded_state
    assert state is not None
    planned = replace(profile, allocator_gib=None, host_gib=20.0)
    for fraction in (1.0, 0.5, 0.0):
        left_gib = (1 - fraction) * state.state_gib
        assert with_fraction(planned, fraction).host_gib == pytest.approx(20 + left_gib)
        assert with_fraction(replace(planned, allocator_gib=1.0), fraction).host_gib == 20
        assert with_fraction(replace(planned, host_gib=None), fraction).host_gib is None
    on_disk = replace(planned, offloaded_state=replace(state, disk_gib=0.25 * state.state_gib, disk_ms=1.0))
    assert with_fraction(on_disk, 0.75).host_gib == pytest.approx(20)  # the disk's part goes first
    assert with_fraction(on_disk, 0.5).host_gib == pytest.approx(20 + 0.25 * state.state_gib)


def test_state_on_the_device_counts_as_static(profile: Profile) -> None:
    all_gib = of_flags("--swap-optimizer", "0").static_gib
    assert with_fraction(profile, 0.0).static_gib == pytest.approx(all_gib)
    half = of_flags("--swap-optimizer", "0.5")
    assert with_fraction(profile, 0.5).static_gib == pytest.approx(half.static_gib)


def test_kernels_take_their_time_however_little_is_copied(profile: Profile) -> None:
    """A step is measured with all state offloaded, so that copies hide kernels. Kernels of state on the device show."""
    assert profile.offloaded_state is not None
    measured_ms, update_ms = profile.non_layer.optimizer_ms, 100.0
    with_kernels = replace(profile, offloaded_state=replace(profile.offloaded_state, update_ms=update_ms))
    for fraction in (0.0, 0.01, 0.02):
        without, with_them = (with_fraction(of, fraction).non_layer.optimizer_ms for of in (profile, with_kernels))
        copy_ms = without - with_fraction(profile, 0.0).non_layer.optimizer_ms
        own_ms = (1 - fraction) * update_ms + max(fraction * update_ms, copy_ms)
        assert with_them == pytest.approx(without - copy_ms + own_ms)
    expected_ms = with_fraction(profile, 1.0).non_layer.optimizer_ms
    assert with_fraction(with_kernels, 1.0).non_layer.optimizer_ms == pytest.approx(expected_ms)
    # If kernels take longer than copies, the measured time is theirs.
    slow = replace(profile, offloaded_state=replace(profile.offloaded_state, update_ms=2 * measured_ms))
    assert with_fraction(slow, 0.0).non_layer.optimizer_ms == 2 * measured_ms


def test_main_values_of_8_bit_weights_are_copied_once_more() -> None:
    """Behind the step, one way: nothing is copied in the other direction then."""
    flags = ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", "--fp8-param-gather", "--swap-optimizer", "auto")
    profile = of_flags(*flags)
    state = profile.offloaded_state
    assert state is not None
    num_linear = 8 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert state.requantized_gib == pytest.approx(4 * num_linear / GIB)
    without = replace(profile, offloaded_state=replace(state, requantized_gib=0.0))
    again_ms = 4 * num_linear / (profile.link.h2d_gb_s * 1e6)
    for fraction in (0.0, 0.25, 1.0):
        saved_ms = (1 - fraction) * again_ms
        expected_ms = with_fraction(without, fraction).non_layer.optimizer_ms - saved_ms
        assert with_fraction(profile, fraction).non_layer.optimizer_ms == pytest.approx(expected_ms)
    in_bf16 = of_flags(*flags[:4], "--swap-optimizer", "auto").offloaded_state
    assert in_bf16 is not None
    assert in_bf16.requantized_gib == 0


def with_disk(profile: Profile, disk_gib: float, disk_ms: float) -> Profile:
    """Return ``profile`` as if ``disk_gib`` of the state were on disk: the step takes what the disk takes longer."""
    assert profile.offloaded_state is not None
    none_ms, all_ms = (with_fraction(profile, fraction).non_layer.optimizer_ms for fraction in (0.0, 1.0))
    non_layer = replace(profile.non_layer, optimizer_ms=none_ms + max(disk_ms, all_ms - none_ms))
    state = replace(profile.offloaded_state, disk_gib=disk_gib, disk_ms=disk_ms)
    return replace(profile, non_layer=non_layer, offloaded_state=state)


def test_the_less_is_offloaded_the_less_is_on_disk(profile: Profile) -> None:
    assert profile.offloaded_state is not None
    state_gib = profile.offloaded_state.state_gib
    on_disk = with_disk(profile, state_gib / 4, 8000.0)
    assert with_fraction(on_disk, 1.0) == on_disk
    for fraction, disk_gib in ((0.9, 0.15 * state_gib), (0.76, 0.01 * state_gib), (0.75, 0.0), (0.2, 0.0)):
        other = with_fraction(on_disk, fraction)
        assert other.offloaded_state is not None
        assert other.offloaded_state.disk_gib == pytest.approx(disk_gib)
        assert other.offloaded_state.disk_ms == pytest.approx(8000.0 * disk_gib / (state_gib / 4))
        without = with_fraction(profile, fraction)
        assert other.static_gib == without.static_gib
        longer_ms = other.non_layer.optimizer_ms - without.non_layer.optimizer_ms
        copy_ms = without.non_layer.optimizer_ms - with_fraction(profile, 0.0).non_layer.optimizer_ms
        assert longer_ms == pytest.approx(max(0.0, other.offloaded_state.disk_ms - copy_ms))


@pytest.mark.parametrize("budget_gib", [30, 26][: sized(2, 1)])
def test_state_leaves_a_slow_disk_if_other_means_cost_less(profile: Profile, budget_gib: float) -> None:
    assert profile.offloaded_state is not None
    on_disk = with_disk(profile, profile.offloaded_state.state_gib / 2, 60000.0)
    best_ms = float("inf")
    for step in range(STEPS + 1):
        try:
            found = solve(replace(with_fraction(on_disk, step / STEPS), offloaded_state=None), budget_gib)
        except Infeasible:
            continue
        best_ms = min(best_ms, found.prediction.step_ms)
    answer, without = solve_fractions(on_disk, budget_gib), solve_fractions(profile, budget_gib)
    assert answer.prediction.step_ms <= 1.002 * best_ms
    assert answer.lower_bound_ms <= answer.prediction.step_ms
    assert answer.plan.offload_fraction is not None
    assert without.plan.offload_fraction is not None
    assert answer.plan.offload_fraction <= max(0.5, without.plan.offload_fraction)
    if without.plan.offload_fraction > 0.5:
        assert answer.prediction.step_ms > without.prediction.step_ms


def test_a_given_fraction_is_the_only_one(profile: Profile) -> None:
    fixed = of_flags("--swap-optimizer", "0.5")
    assert solve_fractions(fixed, 40).plan.offload_fraction == 0.5
    assert solve_fractions(fixed, 80).plan.offload_fraction == 0.5  # though less would do
    assert solve_fractions(of_flags(), 80).plan.offload_fraction is None


def test_what_fits_without_buckets_is_found(profile: Profile) -> None:
    """Little state leaves less memory than the gaps of its buckets take."""
    state = profile.offloaded_state
    assert state is not None
    little = replace(with_fraction(profile, 0.02), allocator_gib=None)
    least_gib, with_buckets_gib = (smallest_budget(with_fraction(little, fraction)) for fraction in (0.0, 0.02))
    assert least_gib < with_buckets_gib
    answer = solve_fractions(little, least_gib + 0.1)
    assert answer.plan.offload_fraction == 0
    assert answer.plan.profile_sha256 == sha256(little)
    with pytest.raises(Infeasible) as error:
        solve_fractions(little, least_gib - 1)
    assert error.value.smallest_gib == pytest.approx(least_gib, rel=0.004)


def test_files(profile: Profile, tmp_path) -> None:  # type: ignore[no-untyped-def]
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    text = (tmp_path / "profile.json").read_text()
    (tmp_path / "profile.json").write_text(text.replace('"share": 1.0', '"share": 1.5'))
    with pytest.raises(UsageError, match="share must be 0 to 1, all others 0 or more"):
        load_profile(tmp_path / "profile.json")
    (tmp_path / "profile.json").write_text(re.sub(r',\s*"disk_gib": 0.0,\s*"disk_ms": 0.0', "", text))
    assert "disk_ms" not in (tmp_path / "profile.json").read_text()
    assert load_profile(tmp_path / "profile.json") == profile  # as written before disks were supported


def test_pipeline_stages_offload_the_largest_fraction(profile: Profile) -> None:
    plan = solve_fractions(profile, 40).plan
    plans = [replace(plan, classes=plan.classes[i::2], offload_fraction=part) for i, part in enumerate((0.25, 0.5))]
    assert merged(plans).offload_fraction == 0.5


def test_copies_of_state_take_as_long_as_copies_in_both_directions() -> None:
    profile = of_flags("--swap-optimizer", "auto")
    link = profile.link
    slow = replace(link, d2h_beside_h2d_gb_s=link.d2h_gb_s / 4, h2d_beside_d2h_gb_s=link.h2d_gb_s / 4)
    profile = replace(profile, non_layer=replace(profile.non_layer, optimizer_ms=1e6))
    one, other = with_fraction(profile, 0.0), with_fraction(replace(profile, link=slow), 0.0)
    assert other.non_layer.optimizer_ms < one.non_layer.optimizer_ms
