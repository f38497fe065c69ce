"""Shared parts of the tests of ``swap.activations``: models of all kinds, and a training loop with and without
swapping."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron import swap
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 32
ALL: dict[str, Any] = {"min_mib": 0, "cpu_delay_ms": 0.5}


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(hidden)))


class Residual(nn.Module):
    """A residual block with batch norm, and in-place changes of tensors that autograd saves or is about to save."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(image)))
        out = self.norm2(self.conv2(out))
        out += image
        return self.relu(out)


class Cnn(nn.Module):
    """A CNN. Its first layer's input, the images, needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList([nn.Sequential(Residual(), Residual()), nn.Sequential(Residual(), Residual())])
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for stage in self.stages:
            hidden = stage(hidden)
        return self.head(hidden.mean((2, 3)))


class Twice(nn.Module):
    """A model with the same layer at several places, and a frozen layer before all others."""

    def __init__(self) -> None:
        super().__init__()
        shared = Mlp()
        self.layers = nn.ModuleList([Mlp().requires_grad_(False), shared, Mlp(), shared, Mlp()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Keyed(nn.Module):
    """A layer that is called by keywords and returns a mapping. Its caller changes the mapping's tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, *, states: dict[str, torch.Tensor]) -> dict[str, Any]:
        hidden = self.mlp(states["hidden"])
        return {"hidden": hidden, "more": [(hidden.view(-1),)]}


class OfKeyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keyed() for _ in range(4)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states = {"hidden": hidden}
        for layer in self.layers:
            states = layer(states=states)
            states["more"][0][0].mul_(1.5)  # a view: the hidden states change with it
        return states["hidden"]


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.second, self.dropout = Mlp(), Mlp(), nn.Dropout(0.2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = lambda given: self.dropout(self.second(given))  # noqa: E731
        return checkpoint(inner, self.first(hidden), use_reentrant=self.use_reentrant)


def mlps(num_layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*(Mlp() for _ in range(num_layers)))


def rows(step: int) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))


def images(step: int) -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> torch.Tensor:
    return rows(step).view(2, 8, WIDTH)


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.3, batch_first=True)
    return nn.TransformerEncoder(layer, 5)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@dataclass
class Trained:
    losses: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    state: dict[str, torch.Tensor]

    def same_as(self, other: Trained) -> bool:
        pairs = [
            *zip(self.losses, other.losses, strict=True),
            *zip(self.grads, other.grads, strict=True),
            *((self.state[name], other.state[name]) for name in self.state | other.state),
        ]
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def train(
    model: nn.Module,
    data: Callable[[int], torch.Tensor] = rows,
    num_steps: int = 4,
    backward: Callable[[nn.Module, torch.Tensor, int], torch.Tensor] | None = None,
) -> Trained:
    """Train. ``backward``: runs forward and backward of a step instead of the plain way, and returns the loss."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        if backward is not None:
            loss = backward(model, data(step), step)
        else:
            loss = loss_of(model(data(step)))
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return Trained(losses, grads, {name: value.clone() for name, value in model.state_dict().items()})


def assert_equal(
    make: Callable[[], nn.Module], data: Callable[[int], torch.Tensor] = rows, layers: str = "all", **options: Any
) -> swap.Stats:
    """Check that training with swapping equals training without, that it swapped, and that it left nothing
    installed."""
    torch.manual_seed(7)
    model = make()
    plain = train(copy.deepcopy(model), data, **options)
    with swap.activations(model, layers, **ALL) as swapped:
        result = train(model, data, **options)
        gc.collect()
        stats = swapped.stats()
    assert result.same_as(plain)
    assert stats.out_bytes > 0
    assert stats.in_bytes > 0
    assert stats.held_bytes == 0
    return stats
