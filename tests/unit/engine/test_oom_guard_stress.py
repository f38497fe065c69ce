"""The out-of-memory guard at length: random programs, a second thread that allocates, hundreds of rescues."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron.swap.common.types import ACTIVATION, LINEAR, MIB, NORM
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.native.guarding import native
from tests.engine import (
    Engine,
    Result,
    Step,
    interleaved,
    one_after_the_other,
    one_forward_one_backward,
    stack,
    train_step,
)
from tests.sizes import sized
from tests.unit.engine.test_oom_guard import PIPELINE, leak_figures, limited, peak_bytes
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    native().unlimit_ram()


def test_hundreds_of_rescues_leave_nothing_behind() -> None:
    layers = stack(4)
    with Engine(layers, swapped=(1, 2), guarded=True, device=EmulatedDevice()) as engine:

        def step() -> None:
            train_step(layers, PIPELINE)
            layers.zero_grad()

        step()
        peak = peak_bytes(step)
        num_rescues, figures = 0, []
        while num_rescues < sized(300, 150):
            limited(step, 0.6 * peak)
            num_rescues += len(engine.guard.take_rescues())
            figures.append(leak_figures(engine))
        assert len(set(figures[1:])) == 1, figures
        assert figures[-1][2:] == (0, 0, 0)


def random_program(number: int) -> tuple[list[Step], list[int] | None, dict[str, Any]]:
    draw = random.Random(number)
    num_layers = draw.randint(2, 4)
    schedule, chunks = draw.choice([
        (one_after_the_other(2), None),
        (one_forward_one_backward(draw.randint(2, 3), draw.randint(2, 3)), None),
        (interleaved(draw.randint(2, 3)), [1, num_layers - 1]),
    ])  # fmt: skip
    recompute = draw.sample([NORM, ACTIVATION, LINEAR], draw.choice([0, 0, 1, 3]))
    return schedule, chunks, {
        "swapped": draw.sample(range(num_layers), draw.randint(0, num_layers)),
        "window_bytes": draw.choice([None, 0, 1, 50_000, 200_000]),
        "commit_bytes": draw.choice([1, 100_000, 16 * MIB]),
        "min_bytes": draw.choice([1, 1024, 10_000]),
        "recompute": recompute,
        "whole": draw.sample(range(num_layers), draw.choice([0, 0, 1, 2])),
        "verify": draw.random() < 0.2,
        "device": EmulatedDevice(draw.choice([0, 0.0002, 0.0005]), seed=number),
        "chunks": chunks,
        "num_layers": num_layers,
        "part": draw.uniform(0.7, 0.97),
    }  # fmt: skip


def outcome_of(number: int) -> str:
    """Return ``rescued``, ``fits``, ``out of memory``, or a description of the error."""
    schedule, chunks, options = random_program(number)
    num_layers, part = options.pop("num_layers"), options.pop("part")
    layers = stack(num_layers)

    def step() -> Result:
        layers.zero_grad()
        return train_step(layers, schedule, chunks)

    plain = train_step(copy.deepcopy(layers), schedule, chunks)
    with Engine(layers, guarded=True, **options) as engine:
        peak = peak_bytes(step)
        layers.zero_grad()
        outcome = "rescued"
        try:
            if not limited(step, part * peak).same_as(plain):
                return "different under the limit"
        except torch.OutOfMemoryError as error:
            if "nothing more to evict" not in str(error):
                return f"no report: {error}"
            outcome = "out of memory"
        if not engine.guard.take_rescues() and outcome == "rescued":
            outcome = "fits"
        if not step().same_as(plain):
            return "different afterwards"
        gc.collect()
        if engine.num_leases or engine.guard._offered:
            return "something was left over"
    return outcome


@pytest.mark.timeout(900)
def test_random_programs() -> None:
    outcomes = {number: outcome_of(number) for number in range(sized(40, 20))}
    wrong = {number: what for number, what in outcomes.items() if what not in ("rescued", "fits", "out of memory")}
    assert not wrong
    found = list(outcomes.values())
    print({what: found.count(what) for what in set(found)})
    assert found.count("rescued") > 0.4 * len(found)
