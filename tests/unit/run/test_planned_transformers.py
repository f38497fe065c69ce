"""``swap.activations(model, memory_gib=…)`` on transformers' architectures: equal to the bit, within the budget."""

from dataclasses import dataclass
from typing import Any

import peft
import pytest
import torch
from torch import nn

from tests.planned_loop import assert_planned

pytest.importorskip("transformers")
from tests.transformers_models import MODELS

DROPOUT = 0.1


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        lora: all linear layers have adapters, and all else is frozen.
        dropout: where the architecture and the adapters have some.
        autocast: to bf16, without its cache.
        accumulates: two micro-batches make a step.
    """

    lora: bool = False
    dropout: bool = False
    autocast: bool = False
    accumulates: bool = False
    dtype: torch.dtype = torch.float32


PLAIN, BF16 = Way(), Way(dtype=torch.bfloat16)
NOT_LORA, NO_DROPOUT = Way(dropout=True, autocast=True, accumulates=True), Way(True, autocast=True, accumulates=True)
NO_AUTOCAST, AT_ONCE = Way(True, dropout=True, accumulates=True), Way(True, dropout=True, autocast=True)
WAYS = {
    "llama": BF16,
    "qwen3": AT_ONCE,
    "mixtral": PLAIN,
    "gpt2": NOT_LORA,
    "t5": PLAIN,
    "bert": NO_AUTOCAST,
    "vit": AT_ONCE,
    "gemma3": BF16,
    "qwen3_moe": NOT_LORA,
    "gpt_neox": NO_DROPOUT,
    "mamba": PLAIN,
    "llava": PLAIN,
    "albert": PLAIN,
}
WHEN = {"llama": []}  # the others run nightly


@pytest.mark.parametrize("name", [pytest.param(name, marks=WHEN.get(name, [pytest.mark.nightly])) for name in WAYS])
def test_equal_to_the_bit_within_the_budget(name: str) -> None:
    batch, way = MODELS[name][1], WAYS[name]
    num_micro_batches = 1 + way.accumulates

    def backward(model: nn.Module, steps: range, _: int) -> torch.Tensor:
        losses = []
        for step in steps:
            with torch.autocast("cpu", torch.bfloat16, enabled=way.autocast, cache_enabled=False):
                losses.append(model(**batch(step)).loss)
            losses[-1].backward()
        return torch.stack(losses).sum()

    def numbers(step: int) -> range:
        return range(step * num_micro_batches, (step + 1) * num_micro_batches)

    settings: dict[str, Any] = {"autocast_cache": False} if way.autocast else {}
    assert_planned(lambda: model_of(name, way), numbers, (0.6, 0.3), backward, **settings)


def model_of(name: str, way: Way) -> nn.Module:
    model = MODELS[name][0]().to(way.dtype).train()
    dropout = DROPOUT * way.dropout
    for module in model.modules():  # planned models have no caches; MKL's last bits follow the layout of keys
        if hasattr(module, "config"):
            module.config.use_cache = False
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = dropout
    if not way.lora:
        return model
    adapters = peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return peft.get_peft_model(model, adapters).to(way.dtype).train()
