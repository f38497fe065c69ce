"""Recorded producers: Megatron's norms, activations, linear layers, sums and queries."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from torch import nn
from torch.nn import functional

from megatron.swap.common.types import ACTIVATION, LINEAR, NORM, RESIDUAL, ROTARY
from megatron.swap.megatron_lm.producers import Producers, record_queries


class Told:
    """A fake ``Recomputer`` that remembers whose calls are recorded, and what is recorded otherwise."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.calls: list[tuple[Any, ...]] = []

    def record(self, *what: Any) -> None:
        self.calls.append(what)

    def recorded(self, producer: str, function: Any, part: int | None = None, context_of: Any = None) -> Any:
        def tells(*arguments: Any) -> Any:
            self.told.append(producer if part is None else f"{producer} {part}")
            return function(*arguments)

        return tells


def mlp(activation: Any, **config: bool) -> MLP:
    module = MLP.__new__(MLP)
    nn.Module.__init__(module)
    names = {"bias_activation_fusion": False, "gated_linear_unit": False, "use_te_activation_func": False}
    module.config = SimpleNamespace(**{**names, **config})
    module.activation_func = activation
    return module


def test_norms_and_activations_tell_until_they_are_given_back():
    for activation, config, tells in (
        (nn.GELU(), {}, True),
        (functional.gelu, {"bias_activation_fusion": True}, False),
        (functional.silu, {"gated_linear_unit": True}, False),
        (functional.silu, {"gated_linear_unit": True, "use_te_activation_func": True}, True),
    ):
        layer = nn.Module()
        layer.input_layernorm, layer.pre_mlp_layernorm, layer.q_layernorm = nn.LayerNorm(4), IdentityOp(), nn.RMSNorm(4)
        layer.mlp = mlp(activation, **config)
        recorder = Told()
        producers = Producers(recorder)  # type: ignore[arg-type]
        producers.wrap(layer)
        for module in (layer.input_layernorm, layer.pre_mlp_layernorm, layer.q_layernorm, layer.mlp.activation_func):
            module(torch.ones(2, 4))
        assert recorder.told == [NORM, NORM, *[ACTIVATION] * tells]
        producers.remove()
        assert layer.mlp.activation_func is activation
        assert not any("forward" in vars(module) for module in layer.modules())


def test_linears_outside_experts_tell_and_only_the_kinds_that_are_wanted():
    layer = nn.Module()
    layer.self_attention, layer.mlp, layer.input_layernorm = nn.Module(), nn.Module(), nn.LayerNorm(4)
    layer.mlp.experts = nn.Module()
    for parent, name in ((layer.self_attention, "linear_qkv"), (layer.self_attention, "linear_proj"),
                         (layer.mlp, "linear_fc1"), (layer.mlp, "linear_fc2"), (layer.mlp.experts, "linear_fc1")):
        parent.add_module(name, nn.Linear(4, 4))
    for kinds, told in (([LINEAR], [f"{LINEAR} 0"] * 2), ([NORM], [NORM]), ([ROTARY], [])):
        recorder = Told()
        producers = Producers(recorder, kinds)  # type: ignore[arg-type]
        producers.wrap(layer)
        for module in layer.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module(torch.ones(2, 4))
        assert recorder.told == told
        producers.remove()


@pytest.mark.parametrize(
    ("training", "dropout", "is_told"), [(True, 0.0, True), (True, 0.1, False), (False, 0.0, False)]
)
def test_the_sum_behind_attention_tells_unless_it_draws(training: bool, dropout: float, is_told: bool):
    layer, told = nn.Module(), Told()
    layer.config = SimpleNamespace(tensor_model_parallel_size=1)
    layer.self_attention = nn.Module()
    layer.self_attention.linear_proj = nn.Linear(4, 4)
    layer.self_attn_bda = get_bias_dropout_add
    producers = Producers(told, [RESIDUAL])  # type: ignore[arg-type]
    producers.wrap(layer)
    parts, residual = (torch.randn(3, 4, requires_grad=True), torch.randn(4)), torch.randn(3, 4)
    with torch.no_grad():
        layer.self_attn_bda(training, False)(parts, residual, dropout)
    assert told.calls == []
    total = layer.self_attn_bda(training, False)(parts, residual, dropout)
    assert len(told.calls) == is_told
    for producer, function, arguments, options, output in told.calls:
        assert (producer, options) == (RESIDUAL, {})
        assert output is total
        before = parts[0].detach().clone()
        assert torch.equal(function(*(one.detach() for one in arguments)), before + parts[1] + residual)
        assert torch.equal(parts[0], before), "the function added in place"
    wrapped = layer.self_attn_bda
    layer.self_attn_bda = lambda *given: wrapped(*given)
    producers.remove()
    layer.self_attn_bda(training, False)(parts, residual, dropout)
    assert len(told.calls) == is_told, "a wrapper around ours stays, and ours is off"
    layer.self_attn_bda = get_bias_dropout_add
    producers.wrap(layer)
    producers.remove()
    assert layer.self_attn_bda is get_bias_dropout_add
    assert "forward" not in vars(layer.self_attention.linear_proj)


def cut(groups: int, heads: int, channels: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and values as Megatron splits linear_qkv's output: [sequence, batch, heads, channels]."""
    width = heads // groups * channels
    mixed = torch.randn(6, 2, groups, width + 2 * channels)
    query, _, value = torch.split(mixed, [width, channels, channels], dim=3)
    return query.reshape(6, 2, heads, channels), value


@pytest.mark.parametrize(("groups", "heads"), [(2, 8), (8, 64)])
def test_queries_of_grouped_heads_are_made_again_from_the_values_storage(groups: int, heads: int):
    query, value = cut(groups, heads)
    told = Told()
    record_queries(told, query, value)  # type: ignore[arg-type]
    ((producer, function, arguments, options, output),) = told.calls
    assert (producer, options) == (ROTARY, {})
    assert output is query
    assert arguments[0].untyped_storage()._cdata == value.untyped_storage()._cdata
    again = function(*arguments)
    assert torch.equal(again, query)
    assert again.untyped_storage().nbytes() == query.untyped_storage().nbytes()


def test_queries_that_are_views_or_come_from_elsewhere_are_not_told():
    query, value = cut(4, 8)
    told = Told()
    for queries, values in (
        cut(8, 8), (query, value.contiguous()),
        (query[:, :, 4:].contiguous(), value[:, :, 2:]),  # more tensor parallel ranks than groups: a part of both
    ):  # fmt: skip
        record_queries(told, queries, values)  # type: ignore[arg-type]
    assert told.calls == []


def test_the_attention_tells_its_queries_until_it_is_given_back(monkeypatch: pytest.MonkeyPatch):
    query, value = cut(2, 8)
    attention = SelfAttention.__new__(SelfAttention)
    nn.Module.__init__(attention)
    attention.q_layernorm = None
    monkeypatch.setattr(SelfAttention, "get_query_key_value_tensors", lambda self, hidden: (query, None, value))
    layer = nn.Module()
    layer.self_attention = attention
    for kinds, num_told in (([ROTARY], 1), ([LINEAR], 0)):
        told = Told()
        producers = Producers(told, kinds)  # type: ignore[arg-type]
        producers.wrap(layer)
        attention.get_query_key_value_tensors(None)
        with torch.no_grad():
            attention.get_query_key_value_tensors(None)
        assert len(told.calls) == num_told
        producers.remove()
        assert "get_query_key_value_tensors" not in vars(attention)
