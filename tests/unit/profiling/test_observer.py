"""The observer counts to the byte what autograd holds, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.types import ACTIVATION, NORM
from megatron.swap.profiling.observer import PLAIN, Observer, StepPeaks
from megatron.swap.profiling.saved_tensor_hooks import Hooks
from tests.engine import (
    Engine,
    batch,
    forward,
    loss_of,
    one_after_the_other,
    one_forward_one_backward,
    stack,
    train_step,
)

NUM_BYTES = 64 * 32 * 4


def test_each_storage_counts_once_however_many_views_are_saved():
    observer = Observer()
    with observer.context(nn.Module()):
        base = batch().requires_grad_().sin()  # saves its input
        product = base[:32] * base[32:]  # saves two views of one storage
    assert observer.live_bytes == 2 * NUM_BYTES
    del base, product
    assert observer.live_bytes == 0
    assert observer.peak_bytes == 2 * NUM_BYTES


def test_what_does_not_count_and_what_still_does():
    """Parameters and views of them, and sparse tensors, which have no storage of their own, do not."""
    linear, observer = nn.Linear(32, 32), Observer()
    with observer.context(linear):
        output = linear(batch())  # saves the input and the transposed weight
    assert observer.live_bytes == NUM_BYTES
    del output
    observer = Observer()
    with observer.context(nn.Module()):
        sparse = torch.eye(64).to_sparse().requires_grad_()
        output = torch.sparse.mm(sparse, batch().requires_grad_())  # saves both
    assert observer.live_bytes == NUM_BYTES
    observer, kept = Observer(), batch()
    with observer.context(nn.Module()):
        output = kept.clone().requires_grad_() * kept
    del output
    assert observer.live_bytes == NUM_BYTES  # dropped by autograd, alive in `kept`
    del kept
    assert observer.live_bytes == 0


def test_hooks_that_take_the_memory_away_stop_it_counting():
    observer = Observer()
    hooks = observer.around(Hooks(lambda tensor: (tensor.numpy().tobytes(), tensor.shape), lambda _: batch()))
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        hidden = batch().requires_grad_()
        output = (hidden * 1).sin()  # saves a tensor that nobody else holds
    assert observer.live_bytes == 0
    assert observer.peak_bytes == NUM_BYTES
    output.sum().backward()
    assert hidden.grad is not None
    assert observer.live_bytes == 0


def test_a_reused_address_is_a_new_storage():
    observer = Observer()
    addresses = set()
    with observer.context(nn.Module()):
        for number in range(200):
            hidden = batch(number).requires_grad_()
            addresses.add(hidden.untyped_storage()._cdata)
            output = hidden.sin()
            assert observer.live_bytes == NUM_BYTES
            del hidden, output
            assert observer.live_bytes == 0
    assert len(addresses) < 200, "no address was ever reused: the test shows nothing"


def test_the_peak_of_a_swapped_stack_does_not_grow_with_its_depth():
    def peak(num_layers: int, swap: bool) -> int:
        layers = stack(num_layers)
        observer = Observer()
        with Engine(layers, None if swap else (), observer=observer, min_bytes=1) as engine:
            for step in range(3):
                observer.peak_bytes = 0
                with observer.context(layers):
                    loss = loss_of(forward(layers, batch(step)))
                loss.backward()
                del loss
            assert engine.num_leases == 0
        assert observer.live_bytes == 0
        return observer.peak_bytes

    assert peak(12, swap=False) > 1.9 * peak(6, swap=False)
    assert peak(12, swap=True) == peak(6, swap=True) < 0.6 * peak(6, swap=False)


def test_peaks_between_two_looks_leave_the_peak_of_the_run() -> None:
    observer = Observer()
    pack = observer.around(PLAIN).pack
    held = [pack(torch.ones(4)), pack(torch.ones(8))]
    assert observer.take_peak() == (48, 48)
    del held[0]
    assert observer.take_peak() == (48, 32)
    assert observer.take_peak() == (32, 32)
    held.clear()
    assert observer.take_peak() == (32, 0)
    assert observer.peak_bytes == 48


def test_saved_bytes_are_those_of_the_storages_that_the_graph_refers_to():
    """A chain of three operations that save their outputs, on one that saves its input."""
    observer = Observer()
    with observer.context(nn.Module()):
        output = batch().requires_grad_().sin().exp().exp().exp()
    assert observer.saved_bytes == 4 * NUM_BYTES
    output.sum().backward()
    assert observer.saved_bytes == 0
    assert observer.end_step() == (4 * NUM_BYTES, 4 * NUM_BYTES)
    assert observer.live_bytes == 2 * NUM_BYTES  # its user holds the output, which holds the leaf
    del output
    assert observer.end_step() == (2 * NUM_BYTES, 0)
    assert observer.end_step() == (0, 0)


@pytest.mark.parametrize("schedule", [one_after_the_other(2), one_forward_one_backward(3)], ids=["alone", "pipeline"])
def test_what_is_saved_is_what_an_unswapped_step_holds(schedule: list[tuple[str, int, int]]):
    """Whatever is offloaded or recomputed site by site, the figure is the one that keeping everything would give."""

    def peaks(**policy: Any) -> StepPeaks:
        layers, observer = stack(4), Observer()
        with Engine(layers, observer=observer, **policy):
            train_step(layers, schedule)
        found = observer.end_step()
        assert found is not None
        return found

    kept = peaks(swapped=[])
    assert 0 <= kept.held_bytes - kept.saved_bytes <= NUM_BYTES  # a caller may hold a tensor that the graph let go
    for policy in ({}, {"swapped": [0, 2]}, {"recompute": (NORM, ACTIVATION)}, {"swapped": [], "recompute": (NORM,)}):
        swapped = peaks(**policy)
        assert swapped.saved_bytes == kept.saved_bytes, policy
        assert swapped.held_bytes < kept.held_bytes, policy


def test_only_the_steps_that_are_asked_for_are_counted():
    layers, observer = stack(3), Observer(is_always_on=False)
    with Engine(layers, observer=observer):
        found = []
        for _ in range(2):
            train_step(layers, one_after_the_other(2))
            found.append(observer.end_step())
            observer.count_steps(1)
        observer.count_steps(0)
        train_step(layers, one_after_the_other(2))
        found.append(observer.end_step())
    assert [peaks is not None for peaks in found] == [False, True, False]
    assert observer.saved_bytes == 0
