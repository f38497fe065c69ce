"""What tells: Megatron's norms and activation functions, and TransformerEngine's norm inside its linear."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from torch import nn
from torch.nn import functional

from megatron.swap.producers import Producers, tell_norm_of_linear
from megatron.swap.types import ACTIVATION, NORM, Action
from patches.registry import UNCHECKED_VARIABLE, apply
from patches.te_normalization import te_normalization_patch
from tests.engine import HIDDEN, Engine, stack
from tests.recipe_cases import one_step, where_known


class Recorder:
    """Stands for ``Recipes``: remembers what is watched."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def watched(self, producer: str, function: Any) -> Any:
        def tells(*arguments: Any) -> Any:
            self.told.append(producer)
            return function(*arguments)

        return tells


def mlp(activation: Any, **config: bool) -> MLP:
    module = MLP.__new__(MLP)
    nn.Module.__init__(module)
    names = {"bias_activation_fusion": False, "gated_linear_unit": False, "use_te_activation_func": False}
    module.config = SimpleNamespace(**{**names, **config})
    module.activation_func = activation
    return module


def test_norms_and_plain_activations_tell_until_they_are_given_back():
    layer = nn.Module()
    layer.input_layernorm, layer.pre_mlp_layernorm, layer.q_layernorm = nn.LayerNorm(4), IdentityOp(), nn.RMSNorm(4)
    layer.mlp = mlp(functional.gelu)
    recorder = Recorder()
    producers = Producers(recorder)  # type: ignore[arg-type]
    producers.watch(layer)
    hidden = torch.ones(2, 4)
    for module in (layer.input_layernorm, layer.pre_mlp_layernorm, layer.q_layernorm, layer.mlp.activation_func):
        module(hidden)
    assert recorder.told == [NORM, NORM, ACTIVATION]
    producers.remove()
    assert layer.mlp.activation_func is functional.gelu
    assert "forward" not in vars(layer.input_layernorm)


@pytest.mark.parametrize(
    ("activation", "config", "tells"),
    [
        (functional.gelu, {"bias_activation_fusion": True}, False),
        (functional.silu, {"gated_linear_unit": True}, False),
        (functional.silu, {"gated_linear_unit": True, "use_te_activation_func": True}, True),
        (nn.GELU(), {}, True),
    ],
    ids=["fused", "gated", "te function", "te module"],
)
def test_which_activation_functions_tell(activation: Any, config: dict[str, bool], tells: bool):
    layer = nn.Module()
    layer.mlp = mlp(activation, **config)
    recorder = Recorder()
    Producers(recorder).watch(layer)  # type: ignore[arg-type]
    layer.mlp.activation_func(torch.ones(2))
    assert recorder.told == [ACTIVATION] * tells


# ----------------------------------------------------------------------------- TransformerEngine's norm and linear


def apply_normalization(x: Any, out: Any, weight: Any, bias: Any, eps: float, quantizer: Any, *rest: Any) -> Any:
    """Stands for TransformerEngine's: same arguments, same results."""
    return torch.ops.aten.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)


class _NormLinear(torch.autograd.Function):
    """Normalizes and multiplies, as one function that saves the norm's input and output."""

    @staticmethod
    def forward(ctx: Any, x: Any, norm_weight: Any, norm_bias: Any, weight: Any) -> Any:
        module = sys.modules["transformer_engine.pytorch.module.layernorm_linear"]
        flat = x.view(-1, x.shape[-1])
        out, mean, rstd = module.apply_normalization(
            flat, None, norm_weight, norm_bias, 1e-5, None, flat.dtype, "LayerNorm", 0, False
        )
        ctx.save_for_backward(flat, norm_weight, norm_bias, weight, out, mean, rstd)
        return (out @ weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, norm_weight, norm_bias, weight, out, mean, rstd = ctx.saved_tensors
        grad = grad.reshape(len(out), -1)
        grads = torch.ops.aten.native_layer_norm_backward(
            grad @ weight, x, [x.shape[-1]], mean, rstd, norm_weight, norm_bias, [True, True, True]
        )
        return (*grads, grad.t() @ out)


class NormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _NormLinear.apply(x, self.norm.weight, self.norm.bias, self.linear.weight)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = NormLinear()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.linear_qkv(hidden_states).tanh()


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A TransformerEngine with that one function."""
    name = "transformer_engine.pytorch.module.layernorm_linear"
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    module = sys.modules[name]
    module.apply_normalization = apply_normalization  # type: ignore[attr-defined]
    monkeypatch.setenv(UNCHECKED_VARIABLE, f"{name}.apply_normalization")
    return module


@contextmanager
def telling(engine: Engine, changed: Callable[[Any], Any] = lambda function: function) -> Iterator[None]:
    """Within, what the norm makes is told; ``changed`` makes another function of the one that is told."""

    def tell(function: Any, *what: Any) -> None:
        tell_norm_of_linear(engine.recipes, changed(function), *what)

    with apply([te_normalization_patch(tell)]):
        yield


def test_the_norm_inside_a_linear_is_recomputed(upstream: types.ModuleType):
    plain, layers = one_step(stack(3, Layer)), stack(3, Layer)
    with Engine(layers, policy=where_known(Action.SWAP)) as engine, telling(engine):
        for _ in range(2):
            assert one_step(layers).same_as(plain)
        assert engine.counters.num_recomputed == 3 * 2 * 2
        assert engine.recipes.refused == {}
    assert upstream.apply_normalization is apply_normalization  # type: ignore[attr-defined]


@pytest.mark.usefixtures("upstream")
def test_a_norm_that_does_not_make_the_same_again_is_refused():
    def drifting(function: Any) -> Any:
        def again(*arguments: Any) -> Any:
            out, *statistics = function(*arguments)
            return (out + 1e-6, *statistics)

        return again

    plain, layers = one_step(stack(2, Layer)), stack(2, Layer)
    with Engine(layers, policy=where_known(Action.SWAP)) as engine, telling(engine, drifting):
        assert one_step(layers).same_as(plain)
        assert set(engine.recipes.refused.values()) == {"made again, it was not the same to the bit"}
        assert engine.counters.num_recomputed == 0
