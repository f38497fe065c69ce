"""Shared parts of the recomputation tests: any choice of actions, layers of one function, layers that change
tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron.swap.common.types import Action, Site
from megatron.swap.engine.policy import Policy
from tests import engine
from tests.engine import HIDDEN, Engine, Result, stack
from tests.engine import one_step as one_step
from tests.lazy_device import LazyDevice


class Choice(Policy):
    """A policy with any action for any site. ``choose`` gets site and producer."""

    def __init__(self, choose: Callable[[Site, str | None], Action]) -> None:
        self.choose = choose

    def swaps_layer(self, layer: int) -> bool:
        return True

    def recomputes_layer(self, layer: int) -> bool:
        return True

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        return self.choose(site, producer)


def where_known(otherwise: Action) -> Choice:
    return Choice(lambda site, producer: Action.RECOMPUTE if producer else otherwise)


def compare(
    layers: nn.ModuleList, run: Callable[[nn.ModuleList], Result] = one_step, num_steps: int = 2, **options: Any
) -> Engine:
    options = {"device": LazyDevice(), "commit_bytes": 1 << 14, **options}
    return engine.compare(layers, run, num_steps, offloads=False, **options)


class Block(nn.Module):
    """A layer of one function of (layer, hidden states). ``norm`` and ``activation`` record what they make."""

    def __init__(self, body: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.other = nn.Linear(HIDDEN, HIDDEN)
        self.activation = functional.gelu
        self.step = 0
        self.body = body

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.body(self, hidden_states)


def blocks(body: Callable[[Block, torch.Tensor], torch.Tensor], num_layers: int = 3) -> nn.ModuleList:
    return stack(num_layers, lambda: Block(body))


def chain(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    return hidden + block.linear(block.activation(block.norm(hidden)))


class Double(torch.autograd.Function):
    """A kernel whose backward does not need its input."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


def doubling(body: Callable[[Block, torch.Tensor], torch.Tensor]) -> nn.ModuleList:
    layers = blocks(body)
    for layer in layers:
        layer.activation = Double.apply
    return layers


def input_changed_later(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    """Change the input later, from the second run on. Correct without hooks, since nothing has saved it before."""
    start = hidden * 1.5
    saved = start.sin() if block.step == 1 else None
    output = block.activation(start)
    if block.step > 1:
        start.add_(0.25)
        saved = start.sin()
    return output.cos() * block.linear(output) + saved


def output_changed_later(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    start = hidden * 1.5
    saved = start.sin()
    output = block.activation(start)
    if block.step > 1:
        output.mul_(3)
    return output.cos() * block.linear(output) + saved


def input_changed_after_saving(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    start = hidden * 1.5
    result = block.linear(block.norm(start))
    with torch.no_grad():
        start.add_(1)
    return result


def output_changed_after_saving(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    norm = block.norm(hidden)
    result = block.linear(norm)
    with torch.no_grad():
        norm.add_(1)
    return result
