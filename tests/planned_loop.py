"""Shared parts of the tests of ``swap.activations`` within a budget: planned training beside unswapped training."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import GIB
from megatron.swap.engine.overrides import override_forward
from megatron.swap.layers.whole import torch_checkpoint
from megatron.swap.profiling.observer import Observer
from tests.plain_loop import Trained, rows, train

NUM_STEPS = 38
"""Enough to choose a plan and follow it for a step: 7 steps that are measured, then up to 6 of search for the budget
itself and for each of the 3 smaller ones that follow if measured peaks are above it, and 6 for memory left free."""
QUIET: dict[str, Any] = {"min_mib": 0, "host_gib": 0.1, "log": lambda _: None}
Backward = Callable[[nn.Module, Any, int], torch.Tensor]


def unswapped(
    model: nn.Module, data: Callable[[int], Any], num_steps: int = NUM_STEPS, **options: Any
) -> tuple[Trained, float]:
    """Train a copy without swapping. Return what came out, and the GiB that autograd held at once."""
    copied, observer = copy.deepcopy(model), Observer()
    inner = copied.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with observer.context(copied):
            return inner(*args, **kwargs)

    override_forward(copied, forward)
    return train(copied, data, num_steps, **options), observer.peak_bytes / GIB


def fraction_gib(model: nn.Module, fraction: float) -> float:
    return fraction * unswapped(model, rows)[1]


def recompute_all(swapped: Any) -> None:
    """Let all layers run again, whatever the planner decides."""
    layers = swapped.parts.layers
    begin = layers.begin

    def whole(*given: Any) -> Any:
        run = begin(*given)
        assert run is not None
        run.checkpoint = torch_checkpoint
        return run

    layers.begin = whole


def check(stats: swap.Stats, tolerance: float = 0.03) -> None:
    """Check that the last step stayed within the budget, and held what was predicted."""
    assert stats.stage == "stable"
    assert stats.budget_gib is not None
    assert stats.predicted_gib is not None
    assert stats.peak_gib is not None
    assert stats.peak_gib <= stats.budget_gib
    assert (1 - tolerance) * stats.predicted_gib <= stats.peak_gib <= (1 + tolerance) * stats.predicted_gib


def assert_planned(
    make: Callable[[], nn.Module],
    data: Callable[[int], Any] = rows,
    fractions: tuple[float, ...] = (0.6, 0.3),
    backward: Backward | None = None,
    tolerance: float = 0.03,
    **settings: Any,
) -> list[str]:
    """Check planned training at fractions of the unswapped activations. Return the plans. ``settings``: more of
    ``swap.activations``."""
    torch.manual_seed(7)
    model = make()
    plain, full_gib = unswapped(model, data, backward=backward)
    plans = []
    for fraction in fractions:
        copied = copy.deepcopy(model)
        with swap.activations(copied, memory_gib=fraction * full_gib, **QUIET, **settings) as swapped:
            assert train(copied, data, NUM_STEPS, backward).same_as(plain)
            check(swapped.stats(), tolerance)
            plans.append(swapped.plan())
        assert not any("forward" in vars(module) or module._forward_pre_hooks for module in copied.modules())
    return plans
