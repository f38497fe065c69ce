"""Casts of weights by autocast: those of weights with one use are not kept until the end of forward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from megatron import swap
from torch import nn
from torch.nn import functional

from megatron.swap.common.types import GIB
from megatron.swap.nn import weight_casts
from tests.plain_loop import WIDTH, Mlp, rows, train
from tests.planned_loop import NUM_STEPS, QUIET, assert_planned, check, unswapped


def under_autocast(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = model(batch).float().square().mean()
    loss.backward()
    return loss


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Cached(nn.Module):
    """A layer that notes whether autocast keeps casts while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = Mlp(), []  # type: ignore[var-annotated]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            SEEN.setdefault(id(self), []).append(torch.is_autocast_cache_enabled())
        return self._run(hidden)

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)  # type: ignore[no-any-return]


SEEN: dict[int, list[bool]] = {}


class UsedTwice(Cached):
    """Its weights have two uses: their casts' gradients are added in 16 bits."""

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(hidden))  # type: ignore[no-any-return]


class ReadTwice(Cached):
    """One of its weights is read by two operators."""

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.inner.up
        return hidden + self.inner.down(up(hidden) * functional.linear(hidden, up.weight))  # type: ignore[no-any-return]


def with_shared_weights() -> nn.Module:
    one, other = Cached(), Cached()
    other.inner.up.weight = one.inner.up.weight
    return Stack(Cached(), one, Cached(), other)


def with_a_layer_twice() -> nn.Module:
    shared = Cached()
    return Stack(Cached(), shared, Cached(), shared)


@pytest.mark.parametrize(
    ("make", "is_uncached"),
    [
        (lambda: Stack(*(Cached() for _ in range(4))), [True, True, True, True]),
        (lambda: Stack(Cached(), UsedTwice(), Cached(), ReadTwice()), [True, False, True, False]),
        (with_shared_weights, [True, False, True, False]),
        (with_a_layer_twice, [True, False, True, False]),
    ],
    ids=["used once", "used twice", "shared", "a layer twice"],
)
def test_only_casts_of_weights_with_one_use_are_not_kept(
    make: Callable[[], nn.Module], is_uncached: list[bool]
) -> None:
    """Losses and gradients are equal to the bit."""
    torch.manual_seed(3)
    model = make()
    plain, full_gib = unswapped(model, rows, backward=under_autocast)
    SEEN.clear()
    with swap.activations(model, memory_gib=0.7 * full_gib, **QUIET):
        assert train(model, rows, NUM_STEPS, under_autocast).same_as(plain)
    assert isinstance(model.layers, nn.ModuleList)
    for layer, uncached in zip(model.layers, is_uncached, strict=True):
        first, *others = SEEN[id(layer)]
        assert first
        assert (not any(others)) if uncached else all(others)
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("make", [lambda: Stack(Cached(), UsedTwice(), Cached(), UsedTwice()), with_shared_weights])
def test_without_looking_at_uses_last_bits_would_differ(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model = make()
    plain, full_gib = unswapped(model, rows, backward=under_autocast)
    monkeypatch.setattr("megatron.swap.nn.operator_records.OperatorOrder.casts_once", True)
    monkeypatch.setattr("megatron.swap.nn.planned_layers.shared_parameters", lambda _: set())
    with swap.activations(model, memory_gib=0.7 * full_gib, **QUIET):
        assert not train(model, rows, NUM_STEPS, under_autocast).same_as(plain)


def test_what_is_held_is_what_is_predicted() -> None:
    """The last budget is less than half of the casts that the unswapped run holds at the end of forward."""
    assert_planned(lambda: Stack(*(Mlp() for _ in range(6))), rows, (0.6, 0.3), under_autocast)


def test_kept_casts_beside_others() -> None:
    model = lambda: Stack(Mlp(), UsedTwice(), Mlp(), Mlp(), UsedTwice())  # noqa: E731
    casts_gib = sum(one.numel() for layer in (1, 4) for one in model().layers[layer].parameters()) * 2 / GIB
    assert_planned(model, rows, (0.8, 0.6, 0.45), under_autocast, lambda: casts_gib)


def test_casts_take_no_memory_beside_the_layers() -> None:
    """With few rows nearly all that is saved is casts of weights. A budget of half of them is kept."""
    torch.manual_seed(3)
    model = Stack(*(Mlp(64) for _ in range(8)))
    model.head = nn.Linear(64, 64)

    def few(step: int) -> torch.Tensor:
        return torch.randn(2, 64, generator=torch.Generator().manual_seed(step))

    casts_gib = sum(one.numel() for one in model.layers.parameters()) * 2 / GIB
    plain = train(copy.deepcopy(model), few, NUM_STEPS, under_autocast)
    with swap.activations(model, memory_gib=0.5 * casts_gib, **QUIET) as swapped:
        assert train(model, few, NUM_STEPS, under_autocast).same_as(plain)
        check(swapped.stats())


def test_parameters_in_several_places() -> None:
    model = Stack(Mlp(), Mlp(), Mlp())
    first, second, third = model.layers
    assert isinstance(first, Mlp)
    assert isinstance(second, Mlp)
    assert weight_casts.shared_parameters(model) == set()
    second.up.weight = first.up.weight
    assert weight_casts.shared_parameters(model) == {id(first.up.weight)}
    model.layers.append(third)
    assert weight_casts.shared_parameters(model) == {id(first.up.weight), *map(id, third.parameters())}


def test_the_cache_is_back_after_an_error() -> None:
    with pytest.raises(KeyError), weight_casts.uncached_casts():
        raise KeyError
    assert torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with weight_casts.uncached_casts():
            pass
        assert not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)
