"""Gradients that a step makes are counted; those that were there, or lie in a buffer of others, are not."""

from __future__ import annotations

import torch
from torch import nn

from megatron.swap.profiling.made_gradients import MadeGradients


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))


def test_gradients_that_are_made_in_a_step_count() -> None:
    model, made = layers(), MadeGradients()
    made.forward_of(model)
    assert made.num_bytes() == 0
    for _ in range(2):  # a second micro-batch adds to them
        model(torch.ones(2, 8)).sum().backward()
        made.forward_of(model)
        assert made.num_bytes() == 4 * (64 + 32)
    model.zero_grad()
    assert made.num_bytes() == 0


def test_what_does_not_count() -> None:
    """Gradients that were there, views of a buffer, and those of frozen weights."""
    model, made = layers(), MadeGradients()
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad(set_to_none=False)
    made.forward_of(model)
    model(torch.ones(2, 8)).sum().backward()
    assert made.num_bytes() == 0
    made.forget()
    model[0].weight.grad = None
    made.forward_of(model)
    model(torch.ones(2, 8)).sum().backward()
    assert made.num_bytes() == 4 * 64

    model, made = layers(), MadeGradients()
    made.forward_of(model)
    bucket = torch.zeros(64 + 32)
    model[0].weight.grad, model[1].weight.grad = bucket[:64].view(8, 8), bucket[64:].view(4, 8)
    assert made.num_bytes() == 0
    model, made = layers().requires_grad_(False), MadeGradients()
    made.forward_of(model)
    model[0].weight.grad = torch.zeros(8, 8)
    assert made.num_bytes() == 0
