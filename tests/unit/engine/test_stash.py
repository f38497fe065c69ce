"""Tensors that an autograd function keeps on its context are swapped like those that autograd saves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from megatron.swap.common.types import UsageError
from megatron.swap.engine.stash import stash
from tests.engine import (
    HIDDEN,
    TOKENS,
    Engine,
    Result,
    batch,
    forward,
    one_after_the_other,
    plain_and_swapped,
    stack,
    train_step,
)


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


def test_hooks_see_what_is_stashed_and_give_it_back():
    packed: list[torch.Tensor] = []
    unpacked: list[int] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor.clone())
        return len(packed) - 1

    def unpack(number: int) -> torch.Tensor:
        unpacked.append(number)
        return packed[number]

    x = torch.randn(8, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        out = Stashing.apply(x)
    assert [one.shape for one in packed] == [(8,), (7,)]
    out.sum().backward()
    assert unpacked == [0, 1]
    plain = x.detach().clone().requires_grad_()
    (plain.tanh() ** 2).sum().backward()
    assert torch.allclose(x.grad, plain.grad)


def test_without_hooks_it_is_just_kept():
    x = torch.randn(8, requires_grad=True)
    Stashing.apply(x).sum().backward()
    assert x.grad is not None


def test_the_memory_is_free_with_the_graph():
    x = torch.randn(8, requires_grad=True)
    out = Stashing.apply(x)
    kept = weakref.ref(out.grad_fn.kept.tensors()[0].untyped_storage())
    assert kept() is not None
    del out
    gc.collect()
    assert kept() is None


class StashingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + Stashing.apply(self.linear(hidden))


def test_the_engine_swaps_it_to_the_bit():
    def run(layers: nn.ModuleList) -> Result:
        return train_step(layers, one_after_the_other(2))

    plain, swapped = plain_and_swapped(stack(4, StashingLayer), run)
    assert swapped.same_as(plain)


def test_what_is_stashed_leaves_the_device():
    layers = stack(3, StashingLayer)
    with Engine(layers, [0, 1]) as engine:
        loss = forward(layers, batch().requires_grad_()).sum()
        num_bytes = TOKENS * HIDDEN * 4
        # Each layer saves the input of its linear and one storage that is stashed, views included.
        assert engine.counters.out_bytes == 2 * 2 * num_bytes
        loss.backward()


def test_changed_in_place_is_an_error():
    hidden = torch.randn(8)
    kept = stash(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.tensors()


def test_in_inference_mode_there_is_nobody_to_save_for():
    with torch.inference_mode():
        a = torch.ones(3)
        (b,) = stash(a).tensors()
        assert b is a


def test_what_is_no_tensor_is_refused():
    with pytest.raises(UsageError, match="a NoneType was given; leave it on ctx"):
        stash(torch.ones(1), None)  # type: ignore[arg-type]
