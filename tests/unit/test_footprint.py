"""What a step saved, counted in two numbers a layer."""

from __future__ import annotations

import pytest

from megatron.swap.footprint import Change, Footprint, FootprintMeter
from megatron.swap.observer import Observer
from megatron.swap.types import ACTIVATION, NORM
from tests.engine import Engine, one_after_the_other, stack, train_step


def test_the_largest_micro_batch_counts() -> None:
    meter = FootprintMeter()
    for layer, sizes in ((0, [10, 20]), (1, [5]), (0, [10, 30]), (1, [])):
        meter.begin_layer()
        for size in sizes:
            meter.add(size)
        meter.end_layer(layer)
    assert meter.take() == Footprint(((0, 2, 40), (1, 1, 5)))
    assert meter.take() == Footprint(())


def test_a_layer_that_broke_off_counts_for_nothing() -> None:
    meter = FootprintMeter()
    meter.begin_layer()
    meter.add(1000)
    meter.begin_layer()
    meter.add(1)
    meter.end_layer(3)
    assert meter.take() == Footprint(((3, 1, 1),))


BEFORE = Footprint(((0, 3, 100), (1, 3, 100)))


@pytest.mark.parametrize(
    ("now", "change", "exceeds"),
    [
        (BEFORE, Change(False), False),
        (Footprint(((0, 3, 104), (1, 3, 98))), Change(False, 0, 1.04), False),
        (Footprint(((0, 3, 104), (1, 3, 90))), Change(False, 1, 0.9), True),
        (Footprint(((0, 4, 100), (1, 3, 100))), Change(True), True),
        (Footprint(((0, 3, 100), (2, 3, 100))), Change(True), True),
    ],
)
def test_changes(now: Footprint, change: Change, exceeds: bool) -> None:
    assert now.change_from(BEFORE) == change
    assert change.exceeds(0.05) is exceeds


def test_it_is_the_same_whatever_happens_to_what_is_saved() -> None:
    seen = set()
    for policy in ({"swapped": []}, {}, {"swapped": [1]}, {"swapped": [], "recompute": (NORM, ACTIVATION)}):
        layers = stack(3)
        for recorded in (False, True):
            with Engine(layers, observer=Observer(), recorded=recorded, **policy) as engine:  # type: ignore[arg-type]
                train_step(layers, one_after_the_other(2))
                seen.add(engine.saved_tensors.footprint.take())
    (footprint,) = seen
    assert [layer for layer, _, _ in footprint.layers] == [0, 1, 2]
