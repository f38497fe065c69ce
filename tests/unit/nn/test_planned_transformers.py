"""``swap.activations(model, memory_gib=…)`` on transformers' architectures: equal to the bit, within the budget."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megatron.swap.common.types import GIB
from tests.planned_loop import assert_planned

pytest.importorskip("transformers")
from tests.transformers_models import MODELS


@dataclass(frozen=True)
class Way:
    """A way to train. Dropout is what the architecture has.

    Attributes:
        fractions: budgets, as fractions of what autograd holds unswapped.
        dtype: of the weights.
        autocast: to bf16, whose cache holds the casts of weights in forward.
        micro_batches: of a step.
        tolerance: largest relative difference between predicted and observed peak.
    """

    fractions: tuple[float, ...] = (0.6, 0.3)
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    micro_batches: int = 1
    tolerance: float = 0.03


BF16, ACCUMULATED = Way(dtype=torch.bfloat16), Way(micro_batches=2)
WAYS = {
    "llama": BF16,
    "qwen3": Way((0.6, 0.35), autocast=True),
    "mixtral": Way(),
    "gpt2": ACCUMULATED,
    "t5": Way(),
    "bert": ACCUMULATED,
    "vit": Way(),
    "gemma3": BF16,
    "qwen3_moe": ACCUMULATED,
    "gpt_neox": BF16,
    "mamba": Way(),
    "llava": Way(),
    "albert": Way(),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "llama")) for name in WAYS])
def test_equal_to_the_bit_within_the_budget(name: str) -> None:
    check_way(name, WAYS[name])


@pytest.mark.slow
def test_autocast_that_keeps_no_casts() -> None:
    """Each weight has one use, so its gradients are the same. The casts of weights take no memory beside the plan."""
    check_way("qwen3", Way(autocast=True), autocast_cache=False)


def check_way(name: str, way: Way, **settings: bool) -> None:
    make, batch = MODELS[name]
    unseen_gib = 0.0

    def build() -> nn.Module:
        nonlocal unseen_gib
        model = make().to(way.dtype).train()
        for module in model.modules():  # planned models have no caches; MKL's last bits follow the layout of keys
            if hasattr(module, "config"):
                module.config.use_cache = False
        if way.autocast and not settings:
            unseen_gib = 2 * sum(parameter.numel() for parameter in model.parameters()) / GIB
        return model

    def backward(model: nn.Module, steps: range, _: int) -> torch.Tensor:
        losses = []
        for step in steps:
            with torch.autocast("cpu", torch.bfloat16, enabled=way.autocast):
                losses.append(model(**batch(step)).loss)
            losses[-1].backward()
        return torch.stack(losses).sum()

    def numbers(step: int) -> range:
        return range(step * way.micro_batches, (step + 1) * way.micro_batches)

    assert_planned(build, numbers, way.fractions, backward, lambda: unseen_gib, way.tolerance, **settings)
