"""Recomputed outputs whose inputs are saved later than their outputs, or never; layers that are recomputed whole."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.types import LINEAR, NORM, PRODUCERS, ROTARY, Action, Site
from megatron.swap.profiling.observer import Observer
from tests.engine import (
    HIDDEN,
    TOKENS,
    Engine,
    Layer,
    Result,
    batch,
    forward,
    loss_of,
    result,
    stack,
)
from tests.recipe_cases import Choice, compare, one_step

HIDDEN_BYTES = TOKENS * HIDDEN * 4
FREQS = torch.linspace(0.1, 2.0, HIDDEN)


class Rotate(torch.autograd.Function):
    """A rotation that saves neither its input nor its output."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return x * angles.cos()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * FREQS.cos(), None


class Mix(torch.autograd.Function):
    """Attention that saves queries, keys and values, in this order."""

    @staticmethod
    def forward(ctx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        return query * key.tanh() * value

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        slope = 1 - key.tanh() ** 2
        return grad * key.tanh() * value, grad * query * slope * value, grad * query * key.tanh()


class Attention(nn.Module):
    """An attention layer. ``copied``: values are copied as in TransformerEngine, so that nobody saves linear_qkv's
    output."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.linear_proj = nn.Linear(HIDDEN, HIDDEN)
        self.copied = copied
        self.rotary, self.copy = Rotate.apply, torch.Tensor.contiguous

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.linear_qkv(hidden).chunk(3, -1)
        query, key = self.rotary(query, FREQS), self.rotary(key, FREQS)
        if self.copied:
            value = self.copy(value)
        mixed = Mix.apply(query, key, value)
        return self.linear_proj(mixed)


class Rotary(nn.Module):
    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), Attention(copied)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.attention(self.norm(hidden_states))


def telling(engine: Engine, layers: nn.ModuleList) -> None:
    for layer in layers:
        layer.attention.rotary = engine.recomputer.recorded(ROTARY, Rotate.apply)
        layer.attention.copy = engine.recomputer.recorded(ROTARY, torch.Tensor.contiguous)


def attention(copied: bool, kinds: list[str] | tuple[str, ...], **options: object) -> Engine:
    """Run three layers over twice two micro-batches, equal to the bit. Only the ``kinds`` are recomputed."""
    plain, layers = one_step(stack(3, lambda: Rotary(copied))), stack(3, lambda: Rotary(copied))
    with Engine(layers, recompute=kinds, **options) as engine:  # type: ignore[arg-type]
        telling(engine, layers)
        for _ in range(2):
            assert one_step(layers).same_as(plain)
            assert engine.num_leases == 0
    return engine


EACH = 3 * 2 * 2
"""Number of layers, micro-batches and steps."""


@pytest.mark.parametrize("swapped", [[], [1]], ids=["none", "middle"])
@pytest.mark.parametrize(
    ("kinds", "num_made", "hidden_units"), [((ROTARY,), 2, 2), ((LINEAR,), 1, 3), (PRODUCERS, 4, 6)],
    ids=["rotary", "linear", "all"],
)  # fmt: skip
def test_values_saved_behind_what_is_made_from_their_storage(
    swapped: list[int], kinds: tuple[str, ...], num_made: int, hidden_units: int
) -> None:
    engine = attention(False, kinds, swapped=swapped, verify=True)
    assert engine.recomputer.refused == {}
    assert engine.counters.num_recomputed == num_made * EACH
    assert engine.counters.totals().recomputed_bytes == hidden_units * HIDDEN_BYTES * EACH
    assert bool(engine.counters.out_bytes) == bool(swapped)


@pytest.mark.parametrize("kinds", [(ROTARY, LINEAR), PRODUCERS], ids=["rotary linear", "all"])
def test_what_nobody_saves_is_made_again_on_the_way_once_for_all_three(kinds: tuple[str, ...]) -> None:
    engine = attention(True, kinds, swapped=[0, 1, 2], verify=True)
    assert engine.recomputer.refused == {}
    assert engine.counters.num_recomputed == (3 + 1 + (NORM in kinds)) * EACH
    assert engine.counters.totals().recomputed_bytes == (3 + (NORM in kinds)) * HIDDEN_BYTES * EACH


def live_bytes(layers: nn.ModuleList, **options: Any) -> int:
    """Return the bytes that are held between forward and backward."""
    observer = Observer()
    with Engine(layers, observer=observer, swapped=[], **options) as engine:
        if isinstance(layers[0], Rotary):
            telling(engine, layers)
        loss = loss_of(forward(layers, batch().requires_grad_()))
        held = observer.live_bytes
        loss.backward()
    return held


def test_waiting_holds_nothing_beyond_the_layer() -> None:
    rotary = lambda **options: live_bytes(stack(4, lambda: Rotary(True)), **options)  # noqa: E731
    angles_bytes = FREQS.untyped_storage().nbytes()  # which recomputation reads
    assert rotary() - rotary(recompute=[ROTARY, LINEAR]) == 4 * 3 * HIDDEN_BYTES - angles_bytes


def test_an_intermediate_that_is_not_the_same_again_is_refused() -> None:
    plain, layers = one_step(stack(2, lambda: Rotary(True))), stack(2, lambda: Rotary(True))
    with Engine(layers, recompute=[ROTARY, LINEAR]) as engine:
        telling(engine, layers)
        for layer in layers:
            linear = layer.attention.linear_qkv
            inner = type(linear).forward
            drifts = lambda x, linear=linear, inner=inner: (  # noqa: E731
                inner(linear, x) if torch.is_grad_enabled() else inner(linear, x) + 1e-3
            )
            linear.forward = engine.recomputer.recorded(LINEAR, drifts)
        assert one_step(layers).same_as(plain)
        assert engine.counters.num_recomputed == 0
        assert set(engine.recomputer.refused.values()) == {"its recomputation gave different bits"}


class Last(Rotary):
    """Nothing is saved after the three sites, so the layer's end has to decide."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention.linear_qkv(self.norm(hidden_states)).chunk(3, -1)
        rotary = self.attention.rotary
        return hidden_states + Mix.apply(rotary(query, FREQS), rotary(key, FREQS), value.contiguous())


def test_a_recipe_is_decided_at_the_layers_end() -> None:
    plain, layers = one_step(stack(2, lambda: Last(True))), stack(2, lambda: Last(True))
    with Engine(layers, recompute=[ROTARY, LINEAR]) as engine:
        telling(engine, layers)
        assert one_step(layers).same_as(plain)
        assert engine.counters.num_recomputed == 2 * 2 * 3


class TestWholeLayers:
    @pytest.mark.parametrize("swapped", [[], [0, 1, 2, 3]], ids=["none", "all"])
    @pytest.mark.parametrize("whole", [[1, 2], [0, 1, 2, 3]], ids=str)
    @pytest.mark.parametrize("kinds", [[], PRODUCERS], ids=["alone", "beside single sites"])
    def test_equal_to_the_bit_with_dropout(self, swapped: list[int], whole: list[int], kinds: list[str]) -> None:
        layers = stack(make=lambda: Layer(dropout=0.2))
        engine = compare(layers, one_step, swapped=swapped, whole=whole, recompute=kinds)
        assert bool(engine.counters.out_bytes) == bool(swapped)

    def test_only_the_input_is_held(self) -> None:
        everything = live_bytes(stack())
        each = (everything - live_bytes(stack(), whole=[1, 2, 3])) // 3
        assert live_bytes(stack(), whole=[2]) == everything - each
        assert live_bytes(stack(), whole=[1, 2, 3]) <= everything - 3 * 15 * HIDDEN_BYTES

    def test_its_input_is_a_site_that_is_swapped(self) -> None:
        seen: set[Site] = set()

        def choose(site: Site, producer: str | None) -> Action:
            seen.add(site)
            return Action.SWAP

        engine = compare(stack(), one_step, policy=Choice(choose), whole=[1])
        assert {site for site in seen if site.layer == 1} == {Site(1, "checkpoint", 0)}
        assert engine.counters.layers[1].out_bytes == HIDDEN_BYTES * 2 * 2

    @pytest.mark.parametrize("is_frozen", [False, True])
    def test_an_input_without_gradient(self, is_frozen: bool) -> None:
        """Then a frozen layer just runs."""

        def run(layers: nn.ModuleList) -> Result:
            layers.zero_grad()
            layers[0].requires_grad_(not is_frozen)
            (loss := loss_of(forward(layers, batch()))).backward()
            return result(layers, loss)

        compare(stack(3), run, whole=[0, 2])
