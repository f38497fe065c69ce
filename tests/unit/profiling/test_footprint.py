"""Footprints of steps: tensors and bytes that each layer saved, and gradients that the step made."""

import pytest
import torch
from torch import nn

from megatron.swap.common.plan import Plan, PlanClass
from megatron.swap.common.types import ACTIVATION, NORM
from megatron.swap.planning.switch import SafePolicy, SwitchingPolicy
from megatron.swap.profiling.footprint import Footprint, FootprintMeter, LayerFootprint
from megatron.swap.profiling.made_gradients import MadeGradients
from megatron.swap.profiling.observer import Observer
from tests.engine import TOKENS, Engine, batch, forward, loss_of, one_after_the_other, stack, train_step
from tests.unit.planner.cases import model


def keeps_all_but(*classes: PlanClass) -> Plan:
    return Plan(model(4), None, None, None, classes)


def test_the_most_of_micro_batches_and_steps_counts() -> None:
    meter = FootprintMeter()
    for layer, sizes in ((0, [10, 20]), (1, [5]), (0, [10, 30]), (1, [])):
        meter.begin_layer(layer)
        for size in sizes:
            meter.add(size)
        meter.end_layer(layer)
    assert meter.take() == Footprint((LayerFootprint(0, 2, 40), LayerFootprint(1, 1, 5)))
    assert meter.take() == Footprint(())
    one = Footprint((LayerFootprint(0, 3, 100, 10), LayerFootprint(1, 3, 50, 5)))
    other = Footprint((LayerFootprint(0, 2, 200, 20), LayerFootprint(2, 1, 1, 1)))
    most = Footprint((LayerFootprint(0, 3, 200, 20), LayerFootprint(1, 3, 50, 5), LayerFootprint(2, 1, 1, 1)))
    assert one.maximum(other) == other.maximum(one) == most


@pytest.mark.parametrize(("sizes", "called_after"), [((104, 106), None), ((106, 100), 0), ((100, 111), 1)])
def test_more_than_is_expected_is_reported_after_the_layer_that_exceeds_it(
    sizes: tuple[int, int], called_after: int | None
) -> None:
    meter, calls = FootprintMeter(), []
    running = -1
    meter.expect(Footprint((LayerFootprint(0, 1, 100), LayerFootprint(1, 1, 100))), 1.05, lambda: calls.append(running))
    meter.begin_chunk()
    for running, num_bytes in enumerate(sizes):
        meter.begin_layer(running)
        meter.add(num_bytes)
        meter.end_layer(running)
    assert (calls[0] if calls else None) == called_after


def test_it_is_the_same_whatever_happens_to_what_is_saved() -> None:
    seen = set()
    for policy in ({"swapped": []}, {}, {"swapped": [1]}, {"swapped": [], "recompute": (NORM, ACTIVATION)}):
        layers = stack(3)
        for recorded in (False, True):
            with Engine(layers, observer=Observer(), recorded=recorded, **policy) as engine:  # type: ignore[arg-type]
                train_step(layers, one_after_the_other(2))
                seen.add(engine.saved_tensors.footprint.take())
    (footprint,) = seen
    assert [entry.layer for entry in footprint.layers] == [0, 1, 2]
    layers = stack(3)
    with Engine(layers, whole=[1]) as engine:
        train_step(layers, one_after_the_other(2))
        taken = engine.saved_tensors.footprint.take()
    assert taken.layers[1] == LayerFootprint(1, 0, 0, footprint.layers[1].input_bytes)
    assert taken.filled_from(footprint) == footprint


def test_where_all_is_kept_layers_run_without_hooks_until_an_input_is_larger() -> None:
    layers = stack(3)
    policy = SwitchingPolicy(SafePolicy(1024, ()), 1024)
    with Engine(layers, policy=policy) as engine:
        footprint = engine.saved_tensors.footprint
        train_step(layers, one_after_the_other(2))
        measured = footprint.take()
        policy.apply_plan(keeps_all_but())
        footprint.expect(measured, 1.05, lambda: setattr(policy, "is_short", True))
        before = engine.counters.out_bytes
        output = forward(layers, batch().requires_grad_())
        assert "_Mark" not in output.grad_fn.name()  # type: ignore[union-attr]
        loss_of(output).backward()
        assert footprint.take().filled_from(measured) == measured
        assert policy.is_idle

        output = forward(layers, batch(tokens=2 * TOKENS).requires_grad_())
        assert not policy.is_idle
        assert "_Mark" in output.grad_fn.name()  # type: ignore[union-attr]
        loss_of(output).backward()
        assert engine.counters.out_bytes > before
        taken = footprint.take()
        assert [entry.num_tensors for entry in taken.layers] == [entry.num_tensors for entry in measured.layers]
        assert taken.num_bytes > 1.5 * measured.num_bytes


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))


def test_gradients_that_are_made_in_a_step_count() -> None:
    model, made = layers(), MadeGradients()
    made.forward_of(model)
    assert made.num_bytes() == 0
    for _ in range(2):  # a second micro-batch adds to them
        model(torch.ones(2, 8)).sum().backward()
        made.forward_of(model)
        assert made.num_bytes() == 4 * (64 + 32)
    model.zero_grad()
    assert made.num_bytes() == 0


def test_what_does_not_count() -> None:
    """Gradients that were there, and views of a buffer."""
    model, made = layers(), MadeGradients()
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad(set_to_none=False)
    made.forward_of(model)
    model(torch.ones(2, 8)).sum().backward()
    assert made.num_bytes() == 0
    model, made = layers(), MadeGradients()
    made.forward_of(model)
    bucket = torch.zeros(64 + 32)
    model[0].weight.grad, model[1].weight.grad = bucket[:64].view(8, 8), bucket[64:].view(4, 8)
    assert made.num_bytes() == 0
