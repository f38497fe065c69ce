"""The number of timed steps after which a run ends."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from torch import nn

from benchmarks.runner import stopwatch
from benchmarks.runner.fp8_scales import fp8_scales
from benchmarks.runner.request import Request
from benchmarks.runner.stopwatch import EnoughSteps, Stopwatch


class Nobody:
    def report(self, stage: str) -> None: ...

    def await_word(self, word: str) -> None: ...


@pytest.mark.parametrize(
    ("limit_s", "num_steps"), [(None, 9), (100.0, 9), (25.0, 5), (20.0, 5), (19.9, 4), (1.0, 4)]
)
def test_a_slow_run_ends_after_its_timed_steps_took_long_enough(
    monkeypatch: pytest.MonkeyPatch, limit_s: float | None, num_steps: int
):
    watch = Stopwatch(Request(flags=(), num_warm_up=2, timed_limit_s=limit_s), Nobody(), None)
    watch._args = Namespace(train_iters=9)
    watch._session = Namespace(
        parts=None, auto=None, planned=Namespace(disk=None), optimizer_swap=None,
        run_device=Namespace(is_made=False, observer=None),
    )
    clock = iter(range(0, 1000, 10))  # each step takes 10 s
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    done = 0
    try:
        for iteration in range(1, 10):
            done = iteration
            watch._on_iteration(iteration, {}, None, True, None)
    except EnoughSteps:
        pass
    assert done == num_steps


def test_scales_and_histories_of_8_bit_layers_are_found():
    scale, history, backward = torch.ones(3), torch.ones(4, 3), torch.ones(2)
    layer, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.fp8_meta = {
        "recipe": "delayed",
        "scaling_fwd": Namespace(scale=scale, amax_history=history),
        "scaling_bwd": Namespace(scale=backward),  # a recipe without a history
    }
    assert [id(one) for one in fp8_scales(nn.Sequential(plain, layer))] == [id(scale), id(history), id(backward)]
