"""The observer counts to the byte what autograd holds, and changes nothing."""

from typing import Any

import pytest
from torch import nn

from megatron.swap.common.types import ACTIVATION, NORM
from megatron.swap.profiling.observer import Observer, StepPeaks
from tests.engine import Engine, batch, one_after_the_other, one_forward_one_backward, stack, train_step

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
    linear, observer = nn.Linear(32, 32), Observer()
    with observer.context(linear):
        output = linear(batch())  # saves the input and the transposed weight
    assert observer.live_bytes == NUM_BYTES
    del output
    observer, kept = Observer(), batch()
    with observer.context(nn.Module()):
        output = kept.clone().requires_grad_() * kept
    del output
    assert observer.live_bytes == NUM_BYTES  # dropped by autograd, alive in `kept`
    del kept
    assert observer.live_bytes == 0


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
