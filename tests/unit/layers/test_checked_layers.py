"""Layers that run again within a budget, in loops that change on the way: their comparisons go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.engine.recomputed_run import RecomputedRunError
from tests.plain_loop import WIDTH, Mlp, loss_of, rows, train
from tests.planned_loop import NUM_STEPS, QUIET, recompute_all, unswapped

FACTOR = [1.0]


@pytest.fixture(autouse=True)
def factor() -> Iterator[None]:
    FACTOR[0] = 1.0
    yield
    FACTOR[0] = 1.0


class OfGlobal(Mlp):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * FACTOR[0]).sin() + hidden


class Recurrent(nn.Module):
    """Its kernel saves a workspace, and leaves a part of it unset."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.cell(self.norm(hidden).unsqueeze(1))[0].squeeze(1)


def model_of(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(kind() for _ in range(4)))


def test_weights_that_are_unfrozen_on_the_way() -> None:
    """A layer that trains more weights saves other tensors."""
    model = model_of(OfGlobal)
    for layer in model:
        layer.down.requires_grad_(False)  # type: ignore[union-attr,operator]
    with swap.activations(model, memory_gib=1.0, **QUIET) as swapped:
        recompute_all(swapped)
        train(model, num_steps=4)
        model.requires_grad_(True)
        train(model, num_steps=2)
        loss_of(model(rows(0))).backward()
        swapped.parts.engine.saved_tensors.checks.read()
        loss = loss_of(model(rows(0)))
        FACTOR[0] = 1.5
        with contextlib.suppress(RecomputedRunError):
            loss.backward()
        with pytest.raises(RecomputedRunError):
            swapped.step()  # type: ignore[union-attr]


def test_a_workspace_of_a_kernel_is_not_compared() -> None:
    model = model_of(Recurrent)
    plain, _ = unswapped(model, rows)
    with swap.activations(model, memory_gib=1.0, **QUIET) as swapped:
        recompute_all(swapped)
        assert train(model, rows, NUM_STEPS).same_as(plain)
