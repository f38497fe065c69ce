"""Layers of random operators, whose runs are repeated: gradients equal those of unswapped training, to the bit."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from megatron.swap.engine.policy import Policy
from tests.plain_loop import WIDTH
from tests.sizes import sized
from tests.unit.native.helpers import NEEDS_COMPILER
from tests.unit.operators.test_repeats import AllRecomputed, Mixed, Run

pytestmark = NEEDS_COMPILER

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_place(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one + 1).mul_(other).add_(1)


def without_gradient(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        factor = other.sigmoid()
    return one * factor


def halves(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    first, second = one.chunk(2, -1)
    return torch.cat([second, first * other[:, : WIDTH // 2]], -1)


def attention(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    heads = one.view(1, 2, 16, 16)
    return F.scaled_dot_product_attention(heads, heads, other.view(1, 2, 16, 16)).reshape(16, WIDTH)


def dropped_output(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    F.layer_norm(one + other, (WIDTH,))
    return one / 2


OPERATORS: tuple[Operator, ...] = (
    in_place, without_gradient, halves, attention, dropped_output,
    lambda one, _: F.gelu(one), lambda one, other: F.silu(one) * other, lambda one, _: one.tanh(),
    lambda one, other: one * other, lambda one, other: one.flip(0) + other, lambda one, other: F.relu_(one - other),
    lambda one, _: (0.1 * one).clamp(-2, 2).exp(), lambda one, _: F.layer_norm(one, (WIDTH,)),
    lambda one, _: one.softmax(-1), lambda one, other: torch.cat([one, other], -1)[:, ::2],
    lambda one, _: F.dropout(one, 0.2), lambda one, other: torch.where(one > other, one, 0.5 * other),
    lambda one, other: (one.bfloat16() * other.bfloat16()).float(), lambda one, _: one - one.max(-1, keepdim=True)[0],
    lambda one, _: one[torch.arange(15, -1, -1)], lambda one, _: one.cumsum(0).clamp(-9, 9),
)  # fmt: skip


class RandomLayer(nn.Module):
    """Three to nine operators, each of two earlier values; a weight between some of them."""

    def __init__(self, chooser: random.Random) -> None:
        super().__init__()
        self.weight, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.steps = [
            (chooser.choice((None, *OPERATORS)), chooser.randrange(number), chooser.randrange(number))
            for number in range(1, chooser.randint(4, 10))
        ]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values = [hidden]
        for operator, one, other in self.steps:
            values.append(self.weight(values[one]) if operator is None else operator(values[one], values[other]))
        return F.layer_norm(hidden + values[-2] + self.out(values[-1]), (WIDTH,))


@pytest.mark.parametrize("policy", [Mixed, AllRecomputed])
@pytest.mark.parametrize("seed", range(sized(4, 2, 8)))
def test_repeated_runs_are_equal_to_the_bit(
    seed: int, policy: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = random.Random(seed)
    run = Run(lambda: RandomLayer(chooser), policy(), monkeypatch)
    for _ in range(2):
        run.step()
    assert run.ended
    assert not all(run.ended)  # a few fit no earlier run, and decide by themselves
