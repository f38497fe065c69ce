"""How a Megatron layer may run again."""

from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.moe.router import Router, TopKRouter
from torch import nn

from megatron.swap.megatron_lm.layer_reads import (
    attributes_read,
    forked_random_states,
    is_well_known,
    may_have_gradients,
)


def layer(*modules: nn.Module, **options: Any) -> Any:
    made = nn.Sequential(*modules)
    given = {"fp8": None, "fp4": None, "recompute_granularity": None, "recompute_modules": None, **options}
    vars(made)["config"] = SimpleNamespace(**given)
    return made


def router() -> Router:
    made = TopKRouter.__new__(TopKRouter)
    nn.Module.__init__(made)
    return made


def test_what_is_known_of_a_layer() -> None:
    class Own(nn.Module):
        pass

    plain = layer(nn.Linear(2, 2))
    assert may_have_gradients(plain)
    for options in ({"fp8": "hybrid"}, {"fp4": "e2m1"}, {"experimental_attention_variant": "dsa"}):
        assert not may_have_gradients(layer(nn.Linear(2, 2), **options)), "its scales or losses depend on them"
    assert not may_have_gradients(layer(nn.Sequential(router()))), "it counts tokens"
    names = attributes_read(router()) or set()
    assert "_buffers" not in names, "its buffers are counts"
    assert "training" in names
    assert forked_random_states(layer(fp8="hybrid").config) is None
    assert forked_random_states(plain.config) is not None
    assert is_well_known(layer(nn.Linear(2, 2), router()))
    assert not is_well_known(layer(nn.Sequential(Own())))
