"""The out-of-memory guard: RAM plays a device with too little memory, and training goes on, equal to the bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron.swap.native.guarding import native
from tests.engine import (
    Engine,
    one_after_the_other,
    stack,
    train_step,
)
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    native().unlimit_ram()


def peak_bytes(run: Callable[[], object]) -> int:
    """Most that ``run`` has on the device besides what is there before."""
    gc.collect()
    before = native().ram_in_use()
    native().limit_ram(1 << 40)
    run()
    native().unlimit_ram()
    return native().ram_peak() - before


def test_a_run_that_dies_without_it_goes_on_with_it() -> None:
    layers = stack(6)
    plain = train_step(copy.deepcopy(layers), one_after_the_other(2))
    with Engine(layers, swapped=(), guarded=True) as engine:
        train_step(layers, one_after_the_other(2))
        peak = peak_bytes(lambda: train_step(layers, one_after_the_other(2)))
        assert engine.guard.take_rescues() == []
        native().limit_ram(int(0.7 * peak))
        for _ in range(3):
            assert train_step(layers, one_after_the_other(2)).same_as(plain)
            rescues = engine.guard.take_rescues()
            assert rescues
        native().unlimit_ram()
    native().limit_ram(int(0.7 * peak))
    with pytest.raises(torch.OutOfMemoryError, match="RAM that plays a device"):
        train_step(copy.deepcopy(layers), one_after_the_other(2))
