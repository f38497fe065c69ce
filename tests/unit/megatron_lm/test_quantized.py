"""Layers in 8 bits, on a stand-in for TransformerEngine: swapped and recomputed equal to the bit, with histories."""

import copy
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.types import ACTIVATION, LINEAR, NORM, QUANTIZED
from megatron.swap.megatron_lm import layer_checkpoint, quantized
from megatron.swap.megatron_lm.layer_checkpoint import can_recompute_layers, check_full_recomputation
from megatron.swap.megatron_lm.producers import Producers
from megatron.swap.megatron_lm.quantized import caches, private_copy, quantization_context
from megatron.swap.patches.registry import apply
from tests.engine import HIDDEN, TOKENS, Engine, Result, batch, forward, loss_of, stack
from tests.lazy_device import LazyDevice
from tests.quantized import (
    Blockwise,
    Current,
    Delayed,
    Layer,
    Parts,
    Quantizer,
    Wrapper,
    patches_for,
    quantizers_of,
    rules,
    take_place,
)

KINDS = (NORM, ACTIVATION, QUANTIZED)
RECIPES = [Current, Delayed, Blockwise]
NUM_STEPS = 3
BY_COLUMN = Parts.by_column


@pytest.fixture(autouse=True)
def _upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    take_place(monkeypatch)


def train(layers: nn.ModuleList) -> Result:
    """Train a few steps of two micro-batches. With delayed scaling the scales change before each backward."""
    result = Result()
    for _ in range(NUM_STEPS):
        layers.zero_grad(set_to_none=True)
        for number in range(2):
            loss = loss_of(forward(layers, batch(number).requires_grad_()))
            for quantizer in quantizers_of(layers):
                quantizer.roll()
            loss.backward()
            result.losses.append(loss.detach())
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter -= 0.05 * parameter.grad
    result.grads = [parameter.detach() for parameter in layers.parameters()]
    result.losses += [torch.tensor(quantizer.history) for quantizer in quantizers_of(layers)]
    result.losses += [quantizer.scale for quantizer in quantizers_of(layers)]
    return result


@contextmanager
def engine_of(layers: Any, **options: Any) -> Iterator[Engine]:
    options = {"device": LazyDevice(), "wrappers": rules(), "min_bytes": 256, **options}
    with Engine(layers, **options) as engine, apply(patches_for(engine)):
        yield engine


def same(recipe: type[Quantizer], **options: Any) -> tuple[bool, Engine]:
    """Return whether training under the engine gives the same bits, and the closed engine."""
    layers = stack(4, lambda: Layer(recipe))
    plain = train(copy.deepcopy(layers))
    with engine_of(layers, **options) as engine:
        swapped = train(layers)
        assert engine.num_leases == 0, "leases were left over"
    return swapped.same_as(plain) and not engine.device.violations, engine


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("swapped", [(), range(3)], ids=["kept", "swapped"])
def test_8_bit_values_are_computed_again(recipe: type[Quantizer], swapped: Any):
    is_same, engine = same(recipe, swapped=swapped, recompute=KINDS)
    assert is_same
    a_tensor = 4 * NUM_STEPS * 2 * TOKENS * HIDDEN  # the inputs of linear_qkv and linear_fc1, linear_fc2, linear_proj
    assert engine.recomputer.spared_bytes == {NORM: 2 * a_tensor, ACTIVATION: 4 * a_tensor, QUANTIZED: 3 * a_tensor}


def shares_amax(quantizer: Any) -> Any:
    """A recomputed value in the next step's slot changes only the history, and losses steps later."""
    other = private_copy(quantizer)
    if isinstance(quantizer, Delayed):
        other.amax = quantizer.amax
    return other


@pytest.mark.parametrize("fault", [lambda quantizer: quantizer, shares_amax], ids=["scale", "history"])
def test_a_scale_or_a_history_that_is_not_forwards_shows(fault: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantized, "private_copy", fault)
    assert not same(Delayed, recompute=KINDS)[0]


def test_random_rounding_and_agreement_among_ranks_are_not_recomputed():
    current = Current()
    assert private_copy(current) is not current
    current.with_amax_reduction = True  # type: ignore[attr-defined]
    assert private_copy(current) is None
    assert private_copy(Quantizer()) is None
    assert private_copy(SimpleNamespace(copy=lambda: "copy")) is None

    class Rounding(Current):
        def is_requantization_safe(self) -> bool:
            return False

    assert private_copy(Rounding()) is None


def test_values_that_differ_are_refused():
    """The quantizer says that it gives the same again, and does not."""

    class Wrong(Current):
        def make(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().make(tensor + 1e-2 * tensor.flip(0))

        def copy(self) -> Quantizer:
            return Current()

    is_same, engine = same(Wrong, recompute=KINDS)
    assert is_same
    assert not engine.recomputer.spared_bytes
    assert "its recomputation gave different bits" in engine.recomputer.refused.values()


class TestWrappers:
    def test_cached_weights_stay_what_they_are(self, monkeypatch: pytest.MonkeyPatch):
        """Their module updates them in place: backward must get the module's own object."""
        layer = Layer()
        with engine_of([layer], swapped=[0]):
            for linear in (layer.linear_qkv, layer.mlp.linear_fc1):
                seen: list[Any] = []
                monkeypatch.setattr(Wrapper, "by_column", lambda self, seen=seen: seen.append(self) or BY_COLUMN(self))
                loss_of(layer(batch().requires_grad_())).backward()
                assert any(one is linear._cached for one in seen)

    @pytest.mark.parametrize("recipe", [Current, Blockwise])
    def test_a_wrapper_moves_by_its_inner_tensors_and_caches_stay(
        self, recipe: type[Quantizer], monkeypatch: pytest.MonkeyPatch
    ):
        """What linear layers save is the same in both; a wrapper adds its values, not a transpose of them."""

        def out_bytes(**options: Any) -> int:
            is_same, engine = same(recipe, swapped=range(3), **options)
            assert is_same
            return int(engine.counters.out_bytes)

        groups, values = 3 * 2 * NUM_STEPS, TOKENS * HIDDEN
        kept, apart = out_bytes(wrappers=None), out_bytes()
        expected = values if recipe is Current else 2 * values + 4 * TOKENS  # smaller scales stay
        assert apart - kept == groups * expected

    def test_parameters_and_others_subclasses_are_not_taken_apart(self):
        values = Current()
        values.internal = False
        wrapper = values(torch.randn(4, 8))
        assert rules().take_apart(wrapper, ()) is not None
        for other in (nn.Parameter(torch.ones(2)), torch.ones(2)):
            assert rules().take_apart(other, ()) is None
        assert caches(wrapper) == ("_transpose",)
        wrapper._data = None
        assert caches(wrapper) == ()


class State:
    """TransformerEngine's global state: 8 bits are on within ``autocast``."""

    is_on = False
    is_fp8_enabled = staticmethod(lambda: State.is_on)
    get_fp8_recipe = staticmethod(lambda: "tensorwise")
    get_fp8_group = staticmethod(lambda: None)


@contextmanager
def autocast(enabled: bool, recipe: Any = None, amax_reduction_group: Any = None) -> Iterator[None]:
    assert not enabled or recipe == "tensorwise"
    before, State.is_on = State.is_on, enabled
    yield
    State.is_on = before


class CoarseLayer(nn.Module):
    """Its linear layer computes with few digits while 8 bits are on, as modules of TransformerEngine do."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.linear_fc1 = Coarse()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=True, recipe="tensorwise"):  # as Megatron does around each layer
            return hidden_states + self.mlp.linear_fc1(hidden_states)[0].sin()


class Coarse(nn.Linear):
    def __init__(self) -> None:
        super().__init__(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        exact = super().forward(x)
        return exact + ((exact * 8).round() / 8 - exact).detach() if State.is_on else exact, None


@pytest.fixture
def te_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    quantized.upstream.cache_clear()
    module = types.ModuleType("transformer_engine.pytorch.quantization")
    module.FP8GlobalStateManager, module.autocast = State, autocast  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(quantized, "HAVE_TE", True)
    yield
    quantized.upstream.cache_clear()


@pytest.mark.usefixtures("te_state")
def test_linear_outputs_are_computed_again_in_8_bits(monkeypatch: pytest.MonkeyPatch):
    """By the product's producers."""
    assert quantization_context() is None
    layers = stack(2, CoarseLayer)
    plain = train(copy.deepcopy(layers))
    monkeypatch.setattr("tests.engine.wrap", lambda *_: ())
    with engine_of(layers, recompute=[LINEAR]) as engine:
        producers = Producers(engine.recomputer, [LINEAR])
        for layer in layers:
            producers.wrap(layer)
        assert train(layers).same_as(plain)
        producers.remove()
    assert engine.recomputer.refused == {}
    assert engine.counters.num_recomputed == 2 * 2 * NUM_STEPS


def config(**given: Any) -> Any:
    return SimpleNamespace(**{"fp8": None, "fp4": None, **given})


def test_a_whole_layer_in_8_bits_goes_through_transformer_engines_checkpoint(monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []
    monkeypatch.setattr(layer_checkpoint, "te_checkpoint", lambda *given: calls.append(given))
    monkeypatch.setattr(layer_checkpoint.tensor_parallel, "checkpoint", lambda *given: calls.append(given))
    layer_checkpoint.layer_checkpoint(3, config(fp8="hybrid"))(max, 1)
    layer_checkpoint.layer_checkpoint(3, config())(max, 1)
    tracker = layer_checkpoint.tensor_parallel.random.get_cuda_rng_tracker
    assert calls == [(max, False, tracker, None, 1), (max, False, 1)]
    with pytest.raises(ValueError, match=r"layer 3 .* --fp4-format e2m1.*Drop --fp4-format, or swap"):
        layer_checkpoint.layer_checkpoint(3, config(fp4="e2m1"))


def test_a_replaced_checkpoint_of_megatron_matters_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layer_checkpoint, "has_megatrons_checkpoint", lambda: False)
    check_full_recomputation(config(fp8="hybrid"))
    with pytest.raises(ValueError, match="needs Megatron's checkpoint"):
        check_full_recomputation(config())
    monkeypatch.setattr(layer_checkpoint, "HAVE_TE", True)
    assert can_recompute_layers(config(fp8="hybrid"))
    assert not can_recompute_layers(config())
    assert not can_recompute_layers(config(fp4="e2m1"))
