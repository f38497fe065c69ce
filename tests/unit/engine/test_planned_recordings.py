"""Recordings under the lowest-memory plan, and plans made from them: the memory is as predicted."""

import random
from collections.abc import Callable, Sequence
from statistics import median

import pytest
from torch import nn

from megatron.swap.common.plan import LAYER_SECTION, Plan
from megatron.swap.common.types import GIB, MIB, PRODUCERS, Action
from megatron.swap.engine.policy import PlanPolicy, Policy
from megatron.swap.planner.assignment import scripts as layer_scripts
from megatron.swap.planner.profile import Device, LayerClass, Link, Pipeline, Profile
from megatron.swap.planner.simulate import simulate
from megatron.swap.planner.solve import empty_plan, smallest_budget, solve
from megatron.swap.planning.switch import SafePolicy
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.profile_builder import build_profile
from megatron.swap.profiling.recording import Recording, What
from megatron.swap.profiling.timeline import Timeline
from tests.engine import (
    HIDDEN,
    TOKENS,
    Engine,
    Layer,
    Result,
    Step,
    one_after_the_other,
    one_forward_one_backward,
    stack,
    train_step,
)
from tests.sizes import sized
from tests.unit.engine.test_recompute_chains import Rotary, telling
from tests.unit.planner.cases import model
from tests.unit.planner.cases import plan as plan_by_hand

F4 = TOKENS * HIDDEN * 4
"""Bytes of hidden states in fp32."""
MIN_BYTES = 1024
NUM_LAYERS = 6
TWO = one_after_the_other(2)
SCHEDULES = [
    pytest.param(TWO, id="one after the other"),
    pytest.param(one_forward_one_backward(6), id="1f1b", marks=pytest.mark.nightly),
]

MAKES: dict[str, Callable[[], nn.Module]] = {
    "transformer layer": Layer,
    "rotary, values copied": lambda: Rotary(True),
    "rotary, values saved": lambda: Rotary(False),
}


def run(
    make: Callable[[], nn.Module], policy: Policy, steps: Sequence[Step] = TWO, window_bytes: int | None = None
) -> tuple[Recording, Result]:
    """Record two steps after two others. A reloaded storage counts from its allocation, as on a device."""
    layers, observer = stack(NUM_LAYERS, make), Observer()
    observer.context(layers)  # parameters do not count
    in_pipeline = steps != TWO
    with Engine(
        layers, observer=observer, policy=policy, recorded=True, ends_in_loss=not in_pipeline,
        window_bytes=window_bytes,
    ) as engine:  # fmt: skip
        assert engine.recorder is not None
        if isinstance(layers[0], Rotary):
            telling(engine, layers)
        for number in range(4):
            if number == 2:
                engine.recorder.start(number)
            result = train_step(layers, steps)
            engine.recorder.step_ended(number + 1)
        assert engine.recomputer.refused == {}
        return engine.recorder.stop(), result


def profile_of(recording: Recording, steps: Sequence[Step] = TWO, **options: bool) -> Profile:
    pipeline = Pipeline() if steps == TWO else Pipeline(2, 0, (tuple(range(NUM_LAYERS)),))
    return build_profile(
        recording, model(NUM_LAYERS), Link(1e6, 1e6, 1e6, 1e6), Device("made up", 1.0),
        num_micro_batches=len(steps) // 2, source="recorded", min_mib=MIN_BYTES / MIB, pipeline=pipeline, **options,
    )  # fmt: skip


def safely(make: Callable[[], nn.Module], steps: Sequence[Step] = TWO, **options: bool) -> Profile:
    return profile_of(run(make, SafePolicy(MIN_BYTES, PRODUCERS), steps)[0], steps, **options)


def needs(entry: LayerClass) -> dict[str, tuple[str, ...]]:
    return {site.site: site.recompute_needs for site in entry.sites if site.recompute_ms is not None}


def device_peak_bytes(recording: Recording) -> int:
    """Return the peak of saved storages, prefetched storages and intermediate results of recomputation together."""
    held = most = 0
    for event in recording.events:
        held += {What.SAVED: 1, What.ARRIVED: 1, What.FREED: -1}.get(event.what, 0) * event.num_bytes
        most = max(most, held)
    return most


class TestChains:
    def test_a_chain_of_saved_sites_is_a_recipe_for_each(self) -> None:
        profile = safely(Layer)
        assert [entry.layers for entry in profile.layers] == [(0,), tuple(range(1, NUM_LAYERS))]
        for entry in profile.layers:
            assert needs(entry) == {
                "attention.linear_qkv/0": ("norm1/0",), "attention/0": ("attention.linear_qkv/0",),
                "mlp.linear_fc1/0": ("norm2/0",), "mlp/0": ("mlp.linear_fc1/0",), "mlp.linear_fc2/0": ("mlp/0",),
            }  # fmt: skip
            assert entry.sections == ()
        ineligible = [site for site in profile.of_layer(0).sites if site.is_ineligible]
        assert [site.site for site in ineligible if site.mib * MIB >= MIN_BYTES] == [
            "norm1/0"  # others hold the first layer's input
        ]

    def test_values_that_are_saved_with_all_three_are_what_the_others_are_made_from(self) -> None:
        (_, entry) = safely(MAKES["rotary, values saved"]).layers
        assert needs(entry) == {
            "attention.linear_qkv/0": ("norm/0",), "attention/2": ("attention.linear_qkv/0",),
            "attention/0": ("attention/2",), "attention/1": ("attention/2",),
        }  # fmt: skip
        assert entry.sections == ()

    def test_sites_behind_what_nobody_saves_are_a_section(self) -> None:
        recording, _ = run(MAKES["rotary, values copied"], SafePolicy(MIN_BYTES, PRODUCERS))
        read = Timeline(recording)
        for entry in profile_of(recording).layers:
            assert needs(entry) == {"attention.linear_qkv/0": ("norm/0",)}
            (section,) = entry.sections
            assert section.frees == ("attention/0", "attention/1", "attention/2")
            assert section.needs == ("attention.linear_qkv/0",)
            assert section.peak_mib == 3 * F4 / MIB  # linear_qkv's output
            parts = [*section.frees, "attention/0+1"]
            costs = {part: [ms for layer in entry.layers for ms in read.costs[layer, part]] for part in parts}
            assert {len(each) for each in costs.values()} == {len(entry.layers) * 2 * 2}
            assert section.recompute_ms == pytest.approx(sum(map(median, costs.values())))
            assert section.recompute_ms > 0

    def test_a_whole_layer_is_a_section_beside_it(self) -> None:
        (_, entry) = safely(MAKES["rotary, values copied"], whole_layers=True).layers
        assert [section.name for section in entry.sections] == ["behind attention/0", LAYER_SECTION]
        assert set(entry.sections[1].frees) == {site.site for site in entry.sites} - {"norm/0"}
        assert entry.sections[1].needs == ("norm/0",)


def carried_out(profile: Profile, plan: Plan, make: str, steps: Sequence[Step]) -> None:
    """Apply ``plan`` in the engine. Every byte on the device is predicted, and training equals training without it.

    In forward what is recomputed is predicted to stay until the layer's end; some of it is gone before.
    """
    window_bytes = None if plan.prefetch_gib is None else int(plan.prefetch_gib * GIB)
    recording, result = run(MAKES[make], PlanPolicy(plan), steps, window_bytes)
    assert result.same_as(train_step(stack(NUM_LAYERS, MAKES[make]), steps))
    prediction = simulate(profile, plan)
    over_bytes = (prediction.peak_gib - profile.static_gib) * GIB - device_peak_bytes(recording)
    scripts = layer_scripts(profile, plan).values()
    dying_mib = max(sum(mib for _, mib, action in one.saves if action is Action.RECOMPUTE) for one in scripts)
    assert 0 <= over_bytes <= dying_mib * MIB * prediction.peak_at.startswith("forward"), plan


@pytest.mark.parametrize("steps", SCHEDULES)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.slow
def test_a_plan_of_a_recording_holds_what_was_predicted(make: str, steps: list[Step]) -> None:
    """The budgets range from keeping everything to the least that any plan holds."""
    profile = safely(MAKES[make], steps)
    unswapped_gib, least_gib = simulate(profile, empty_plan(profile)).peak_gib, smallest_budget(profile)
    seen: set[Action] = set()
    for share in (1.0, 0.6, 0.2, 0.0, 0.8, 0.4)[: sized(3, 2, 6)]:
        budget_gib = least_gib + share * (unswapped_gib - least_gib)
        solution = solve(profile, budget_gib)
        plan = solution.plan
        assert not any(plan.sections(layer) for layer in plan.layers()), "training knows only sites"
        assert solution.prediction.peak_gib <= budget_gib
        carried_out(profile, plan, make, steps)
        seen.update(action for layer in plan.layers() for action in plan.sites(layer).values())
    assert seen >= {Action.KEEP, Action.SWAP}


@pytest.mark.parametrize("steps", SCHEDULES)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.slow
def test_any_plan_holds_what_was_predicted(make: str, steps: list[Step]) -> None:
    profile, source = safely(MAKES[make], steps), random.Random(make)
    for _ in range(sized(2, 2, 6)):
        classes = {}
        for layer in range(NUM_LAYERS):
            entry, chances = profile.of_layer(layer), source.choice([(1, 1, 1), (1, 0, 0), (1, 4, 4), (0, 1, 3)])
            together = {site for section in entry.sections for site in section.frees}
            actions = {
                site.site: source.choices(
                    ["keep", "swap", "recompute" if site.recompute_ms is not None else "swap"], chances
                )[0]
                for site in entry.sites if not site.is_ineligible and site.site not in together
            }  # fmt: skip
            actions.update(dict.fromkeys(together, source.choice(["keep", "swap", "recompute"])))
            classes[layer,] = actions
        carried_out(profile, plan_by_hand(profile, classes), make, steps)
