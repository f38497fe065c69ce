"""Micro-batches in flight in any order, with any window and any delays: losses and gradients equal to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.swap.common.types import MIB
from megatron.swap.devices.emulated import EmulatedDevice
from tests.engine import (
    Engine,
    Step,
    interleaved,
    one_after_the_other,
    one_forward_one_backward,
    plain_and_swapped,
    stack,
    train_step,
)
from tests.lazy_device import LazyDevice
from tests.sizes import sized

SCHEDULES: dict[str, tuple[list[Step], list[int] | None]] = {
    "one after the other": (one_after_the_other(3), None),
    "1F1B": (one_forward_one_backward(5, 2), None),
    "1F1B deep": (one_forward_one_backward(5, 4), None),
    "all forward first": (one_forward_one_backward(4, 4), None),
    "interleaved": (interleaved(4), [3, 3]),
    "interleaved three chunks": (interleaved(4, num_chunks=3), [2, 2, 2]),
}


@pytest.mark.parametrize("window_bytes", [None, 1, 200_000], ids=["window None", "tiny window", "window of a group"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_trains_to_the_bit(name: str, window_bytes: int | None):
    schedule, chunks = SCHEDULES[name]
    for device in (LazyDevice(), None):
        plain, swapped = plain_and_swapped(
            stack(6),
            lambda layers: train_step(layers, schedule, chunks),
            device=device,
            chunks=chunks,
            window_bytes=window_bytes,
            verify=True,
        )
        assert swapped.same_as(plain)


@pytest.mark.parametrize("name", ["one after the other", "1F1B", "1F1B deep", "all forward first", "interleaved"])
def test_once_the_order_is_learned_nothing_comes_late(name: str):
    schedule, chunks = SCHEDULES[name]
    layers = stack(6)
    with Engine(layers, device=LazyDevice(), chunks=chunks) as engine:
        train_step(layers, schedule, chunks)
        for _ in range(3):
            before = engine.counters.num_late
            train_step(layers, schedule, chunks)
            assert engine.counters.num_late == before


def test_another_number_of_micro_batches_every_step():
    layers = stack(5)
    plain = copy.deepcopy(layers)
    with Engine(layers, device=LazyDevice()) as engine:
        for num_micro_batches in (3, 1, 5, 2, 2, 4):
            schedule = one_forward_one_backward(num_micro_batches, 2)
            assert train_step(layers, schedule).same_as(train_step(plain, schedule))
            assert engine.num_leases == 0
        assert not engine.device.violations


@pytest.mark.parametrize("swapped", [[0], [5], [0, 1, 2], [1, 3, 5], [0, 2, 3, 4]])
def test_any_choice_of_layers(swapped: list[int]):
    layers = stack(6)
    plain = train_step(copy.deepcopy(layers), one_forward_one_backward(4))
    with Engine(layers, swapped, device=LazyDevice()) as engine:
        for _ in range(2):
            assert train_step(layers, one_forward_one_backward(4)).same_as(plain)
        assert not engine.device.violations
        assert set(engine.counters.layers) <= set(swapped)


@pytest.mark.parametrize("pattern", ["mlp", "attention", "mlp.linear_fc1", "layer"])
def test_any_choice_of_modules(pattern: str):
    layers = stack(6)
    plain = train_step(copy.deepcopy(layers), one_after_the_other(2))
    with Engine(layers, modules=[pattern], device=LazyDevice()) as engine:
        for _ in range(2):
            assert train_step(layers, one_after_the_other(2)).same_as(plain)
        everything = 6 * 4 * 160 * 1024
        assert 0 <= engine.counters.out_bytes < everything
        assert not engine.device.violations


def test_training_with_an_optimizer_follows_the_plain_path():
    def weights(swap: bool) -> list[torch.Tensor]:
        layers = stack(6)
        optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
        with Engine(layers, None if swap else ()):
            for _ in range(5):
                train_step(layers, one_forward_one_backward(3))
                optimizer.step()
        return [parameter.detach() for parameter in layers.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(False), weights(True), strict=True))


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Step], list[int]]:
    """Generate any order that respects dependencies."""
    chunks = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    num_micro_batches = draw(st.integers(1, 4))
    last = len(chunks) - 1
    # A micro-batch goes through F of all chunks, then B of all chunks backwards; which one moves on is free.
    route: list[tuple[str, int]] = [("F", c) for c in range(last + 1)] + [("B", c) for c in range(last, -1, -1)]
    progress = [0] * num_micro_batches
    schedule: list[Step] = []
    while moving := [mb for mb, at in enumerate(progress) if at < len(route)]:
        mb = draw(st.sampled_from(moving))
        what, chunk = route[progress[mb]]
        schedule.append((what, chunk, mb))
        progress[mb] += 1
    return schedule, chunks


@settings(max_examples=sized(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schedules(),
    st.data(),
    st.sampled_from([None, 1, 50_000, 200_000, 500_000]),
    st.sampled_from([1, 10_000, 100_000, 16 * MIB]),
    st.sampled_from([1, 1024, 10_000]),
    st.sampled_from(["lazy", "lazy in, eager out", "eager in, lazy out", "threads", "slow threads"]),
)
def test_whatever_the_order_window_sizes_and_delays_the_result_is_the_plain_one(
    scheduled: tuple[list[Step], list[int]],
    data: st.DataObject,
    window_bytes: int | None,
    commit_bytes: int,
    min_bytes: int,
    kind: str,
):
    schedule, chunks = scheduled
    num_layers = sum(chunks)
    swapped = data.draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    device = {
        "lazy": LazyDevice,
        "lazy in, eager out": lambda: LazyDevice(eager=["out"]),
        "eager in, lazy out": lambda: LazyDevice(eager=["in"]),
        "threads": EmulatedDevice,
        "slow threads": lambda: EmulatedDevice(longest_delay_s=0.001, seed=data.draw(st.integers(0, 99))),
    }[kind]()
    layers = stack(num_layers)
    plain = train_step(copy.deepcopy(layers), schedule, chunks)
    with Engine(
        layers,
        swapped,
        device=device,
        chunks=chunks,
        window_bytes=window_bytes,
        commit_bytes=commit_bytes,
        min_bytes=min_bytes,
        verify=True,
    ) as engine:
        for _ in range(2):
            assert train_step(layers, schedule, chunks).same_as(plain)
            assert engine.num_leases == 0
            assert not len(engine.manager._state.offloading)
        assert not getattr(device, "violations", [])
