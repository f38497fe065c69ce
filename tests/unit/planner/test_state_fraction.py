"""The fraction of offloaded optimizer state: no more than the budget requires, with the shortest step."""

from contextlib import suppress
from dataclasses import replace

import pytest

from megatron.swap.common.plan import Infeasible, merged
from megatron.swap.forecast.flags import read_flags
from megatron.swap.forecast.gpus import find_gpu
from megatron.swap.forecast.shape import shape_profile
from megatron.swap.planner.profile import Profile, sha256
from megatron.swap.planner.solve import solve
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


def test_as_good_as_the_best_of_all_fractions(profile: Profile) -> None:
    best_ms = float("inf")
    for step in range(0, STEPS + 1, sized(2, 4, 1)):
        part = with_fraction(profile, step / STEPS)
        with suppress(Infeasible):
            best_ms = min(best_ms, solve(replace(part, offloaded_state=None), 38).prediction.step_ms)
    answer = solve_fractions(profile, 38)
    assert answer.prediction.step_ms <= 1.002 * best_ms
    assert answer.prediction.peak_gib <= 38
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


def test_a_given_fraction_is_the_only_one(profile: Profile) -> None:
    fixed = of_flags("--swap-optimizer", "0.5")
    assert solve_fractions(fixed, 40).plan.offload_fraction == 0.5
    assert solve_fractions(fixed, 80).plan.offload_fraction == 0.5  # though less would do
    assert solve_fractions(of_flags(), 80).plan.offload_fraction is None


def test_pipeline_stages_offload_the_largest_fraction(profile: Profile) -> None:
    plan = solve_fractions(profile, 40).plan
    plans = [replace(plan, classes=plan.classes[i::2], offload_fraction=part) for i, part in enumerate((0.25, 0.5))]
    assert merged(plans).offload_fraction == 0.5
