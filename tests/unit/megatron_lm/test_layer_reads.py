"""How a Megatron layer may run again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.moe.router import Router, TopKRouter
from torch import nn

from megatron.swap.megatron_lm.layer_reads import attributes_read, forked_random_states, may_have_gradients


def layer(*modules: nn.Module, **options: Any) -> Any:
    made = nn.Sequential(*modules)
    vars(made)["config"] = SimpleNamespace(**{"fp8": None, "fp4": None, **options})
    return made


def router() -> Router:
    made = TopKRouter.__new__(TopKRouter)
    nn.Module.__init__(made)
    return made


def test_a_plain_layer_may_have_gradients_in_its_turn() -> None:
    assert may_have_gradients(layer(nn.Linear(2, 2)))
    assert may_have_gradients(layer(experimental_attention_variant="gated_delta_net"))


@pytest.mark.parametrize("options", [{"fp8": "hybrid"}, {"fp4": "e2m1"}, {"experimental_attention_variant": "dsa"}])
def test_not_one_whose_scales_or_losses_depend_on_them(options: dict[str, str]) -> None:
    assert not may_have_gradients(layer(nn.Linear(2, 2), **options))


def test_not_one_that_counts_tokens() -> None:
    assert not may_have_gradients(layer(nn.Sequential(router())))


def test_buffers_of_a_router_are_counts() -> None:
    names = attributes_read(router())
    assert names is not None
    assert "_buffers" not in names
    assert "training" in names


def test_scales_are_those_of_one_run() -> None:
    assert forked_random_states(layer(fp8="hybrid").config) is None
    assert forked_random_states(layer().config) is not None
