"""Tensors that an autograd function keeps on its context are swapped like those that autograd saves."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.swap.common.types import UsageError
from megatron.swap.engine.stash import stash
from tests.engine import HIDDEN, TOKENS, Engine, batch, compare, forward, stack


class Stashing(torch.autograd.Function):
    """Computes tanh(x) twice over, with one of the results on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()
        ctx.kept = stash(y, y[1:])
        return y * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        y, part = ctx.kept.tensors()
        assert torch.equal(y[1:], part)
        return grad * 2 * y * (1 - y * y)


class StashingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + Stashing.apply(self.linear(hidden))


@pytest.mark.parametrize("hooked", [True, False])
def test_hooks_see_what_is_stashed_and_give_it_back_and_without_them_it_is_kept(hooked: bool) -> None:
    packed: list[torch.Tensor] = []
    x = torch.randn(8, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    (plain.tanh() ** 2).sum().backward()
    hooks = saved_tensors_hooks(lambda tensor: packed.append(tensor.clone()) or packed[-1], lambda tensor: tensor)
    with hooks if hooked else nullcontext():
        out = Stashing.apply(x)
    out.sum().backward()
    assert [one.shape for one in packed] == [(8,), (7,)] * hooked
    assert torch.allclose(x.grad, plain.grad)


def test_the_engine_swaps_it_to_the_bit() -> None:
    compare(stack(4, StashingLayer))
    layers = stack(3, StashingLayer)
    with Engine(layers, [0, 1]) as engine:
        loss = forward(layers, batch().requires_grad_()).sum()
        # Each layer saves the input of its linear and one storage that is stashed, views included.
        assert engine.counters.out_bytes == 2 * 2 * TOKENS * HIDDEN * 4
        loss.backward()


def test_changes_in_place_other_things_than_tensors_and_inference_mode() -> None:
    hidden = torch.randn(8)
    kept = stash(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.tensors()
    with pytest.raises(UsageError, match="a NoneType was given; leave it on ctx"):
        stash(torch.ones(1), None)  # type: ignore[arg-type]
    with torch.inference_mode():  # there is nobody to save for
        a = torch.ones(3)
        assert stash(a).tensors()[0] is a
