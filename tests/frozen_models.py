"""Models of frozen layers with trained adapters, and their training with and without swapped weights."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron import swap
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.swap.devices.base import Device
from megatron.swap.params.module_weights import WeightSwap
from tests.weight_models import Stack, num_hooks

WIDTH = 16


class Adapted(nn.Module):
    """A frozen layer that uses its weights in several ways, and a trained adapter of low rank."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.register_buffer("rotation", torch.randn(width, width) / width**0.5)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        self.what: Callable[[], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) @ self.rotation
        what, self.what = self.what, None
        if what is not None:
            what()
        y = self.down(torch.tanh(self.up(y))) + self.b(self.a(y))
        return x + self.scale * y


class SelfCheckpointing(Adapted):
    """A layer that checkpoints its own forward, as those of transformers 5.23: no hook of it sees the second run."""

    use_reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class Reentrant(SelfCheckpointing):
    use_reentrant = True


class Model(Stack):
    """Layers in segments, each of which ``run`` runs."""

    segments: tuple[tuple[int, ...], ...] = ()
    run = staticmethod(lambda function, x: function(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for segment in self.segments:
            x = self.run(nn.Sequential(*(self.layers[number] for number in segment)), x)
        return self.last(x)


def make(
    layer: Callable[[int], nn.Module] = Adapted,
    num_layers: int = 5,
    dtype: torch.dtype = torch.float32,
    width: int = WIDTH,
) -> Model:
    torch.manual_seed(7)
    model = Model([layer(width) for _ in range(num_layers)], nn.Linear(4, width), nn.Linear(width, 3))
    model.segments = tuple((number,) for number in range(num_layers))
    return model.to(dtype)


def in_segments(segments: tuple[tuple[int, ...], ...], use_reentrant: bool) -> Model:
    model = make()
    model.segments = segments
    model.run = lambda function, x: checkpoint(function, x, use_reentrant=use_reentrant)
    return model


ALONE = tuple((number,) for number in range(5))
MODELS: dict[str, Callable[[], Model]] = {
    "plain": make,
    "bfloat16": lambda: make(dtype=torch.bfloat16),
    "one layer": lambda: make(num_layers=1),
    "two layers": lambda: make(num_layers=2),
    "checkpoints": lambda: in_segments(ALONE, False),
    "reentrant checkpoints": lambda: in_segments(ALONE, True),
    "checkpoints of three layers": lambda: in_segments(((0, 1), (2, 3, 4)), False),
    "reentrant checkpoints of three layers": lambda: in_segments(((0, 1), (2, 3, 4)), True),
    "checkpoints inside": lambda: make(SelfCheckpointing),
    "reentrant checkpoints inside": lambda: make(Reentrant),
}


def data(model: Model, seed: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)).to(model.last.weight)


Step = Callable[[Model, int], Iterator[torch.Tensor]]
"""Runs forwards and backwards, and yields losses."""


def one_batch(model: Model, step: int) -> Iterator[torch.Tensor]:
    loss = model(data(model, step)).square().mean()
    loss.backward()
    yield loss


@dataclass
class Trained:
    """Losses of all steps, gradients of all trained parameters after each step, all parameters at the end."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    weights: list[torch.Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Trained)
        pairs = [(self.losses, other.losses), (self.gradients, other.gradients), (self.weights, other.weights)]
        return all(_equal(mine, theirs) for ours, others in pairs for mine, theirs in zip(ours, others, strict=True))


def _equal(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    return mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)


def train(model: Model, step: Step = one_batch, num_steps: int = 3, after: Callable[[], Any] = lambda: None) -> Trained:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []
    for number in range(num_steps):
        losses += [loss.detach().clone() for loss in step(model, number)]
        gradients += [None if one.grad is None else one.grad.clone() for one in trained]
        optimizer.step()
        optimizer.zero_grad()
        after()
    return Trained(losses, gradients, [parameter.detach().clone() for parameter in model.parameters()])


def check_equal(
    model: Model,
    device: Device,
    step: Step = one_batch,
    *inner: Callable[[Model], AbstractContextManager[Any]],
    is_equal: bool = True,
    num_steps: int = 3,
) -> WeightSwap:
    """Check that ``model`` trains with swapped weights as without, or not if planted faults say so. Return the swap.
    ``inner`` make contexts around that training."""
    alone = train(copy.deepcopy(model), step, num_steps)
    with ExitStack() as stack:
        swapped = stack.enter_context(swap.weights(model, model.layers, training=True, device=device))
        for context in inner:
            stack.enter_context(context(model))
        together = train(model, step, num_steps)
    assert (together == alone) is is_equal
    assert num_hooks(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())
    return swapped
