"""Micro-batches in flight in any order, with any window and any delays: losses and gradients equal to the bit."""

import copy

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.swap.common.types import MIB
from megatron.swap.devices.emulated import EmulatedDevice
from tests.engine import (
    Engine,
    Step,
    stack,
    train_step,
)
from tests.lazy_device import LazyDevice
from tests.sizes import sized


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


@settings(max_examples=sized(12, 8, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules(), st.data())
def test_whatever_the_order_window_sizes_and_delays_the_result_is_the_plain_one(
    scheduled: tuple[list[Step], list[int]], data: st.DataObject
) -> None:
    schedule, chunks = scheduled
    one_of = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    device = one_of(
        LazyDevice, lambda: LazyDevice(eager=["out"]), lambda: LazyDevice(eager=["in"]), EmulatedDevice,
        lambda: EmulatedDevice(longest_delay_s=0.001, seed=data.draw(st.integers(0, 99))),
    )()  # fmt: skip
    layers = stack(sum(chunks))
    plain = train_step(copy.deepcopy(layers), schedule, chunks)
    with Engine(
        layers, data.draw(st.sets(st.integers(0, len(layers) - 1), min_size=1)), device=device, chunks=chunks,
        window_bytes=one_of(None, 1, 50_000, 200_000, 500_000), commit_bytes=one_of(1, 10_000, 100_000, 16 * MIB),
        min_bytes=one_of(1, 1024, 10_000), verify=True,
    ) as engine:  # fmt: skip
        for _ in range(2):
            assert train_step(layers, schedule, chunks).same_as(plain)
            assert engine.num_leases == 0
            assert not len(engine.manager._state.offloading)
        assert not getattr(device, "violations", [])
