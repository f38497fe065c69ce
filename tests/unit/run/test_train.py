"""``swap.train``: one call for models of PyTorch and of Megatron."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.models.hints import ModelHints
from tests.plain_loop import Mlp, loss_of, mlps, rows, train
from tests.planned_loop import NUM_STEPS, QUIET, check, fraction_gib
from tests.unit.run.test_install import model_of, one_rank  # noqa: F401
from tests.unit.run.test_install import train as train_megatron


def test_a_budget_for_a_model_of_pytorch() -> None:
    torch.manual_seed(7)
    model = mlps()
    plain = train(copy.deepcopy(model), num_steps=NUM_STEPS)
    with swap.train(model, memory_gib=fraction_gib(model, 0.5), **QUIET) as run:
        assert train(model, num_steps=NUM_STEPS).same_as(plain)
        check(run.stats())
    assert run.stats().num_steps == NUM_STEPS - 1  # the last one ends with the next forward


def test_the_optimizer_that_is_given_ends_a_step() -> None:
    torch.manual_seed(7)
    model = mlps()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with swap.train(model, optimizer, memory_gib=1.0, **QUIET) as run:
        loss_of(model(rows(0))).backward()
        optimizer.step()
        assert run.stats().num_steps == 1


class InADict(nn.Module):
    """Layers where nobody looks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Mlp() for name in "abcd"})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("settings", [{"layers": "all"}, {"memory_gib": 0.5}])
def test_hints_name_the_layers(settings: dict[str, Any]) -> None:
    torch.manual_seed(7)
    model = InADict()
    plain = train(copy.deepcopy(model), num_steps=3)
    with pytest.raises(UsageError, match="no layers were found in InADict"):
        swap.train(model, **settings)
    with swap.train(model, hints=ModelHints(model, list(model.blocks.values())), **settings, **QUIET) as run:
        assert train(model, num_steps=3).same_as(plain)
        assert len(run.layers) == 4
        assert run.stats().out_bytes


def test_frozen_weights_are_offloaded_beside_activations() -> None:
    torch.manual_seed(7)
    model = mlps()
    for layer in model[:3]:
        layer.requires_grad_(False)
    plain = train(copy.deepcopy(model), num_steps=3)
    with swap.train(model, layers="all", weights="0-2", **QUIET) as run:
        assert train(model, num_steps=3).same_as(plain)
        assert run.weights is not None
        assert run.weights.stats.in_bytes
        assert run.stats().out_bytes
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "nothing is to be swapped. Give memory_gib, layers or weights"),
        ({"layers": "none"}, "none of the 6 layers would be swapped"),
        ({"layers": "all", "modules": ("mlp",)}, r"modules=\('mlp',\) is for Megatron models"),
        ({"layers": "all", "min_mib": -1}, "min_mib=-1.0: must be"),
        ({"memory_gib": 1.0, "layers": "0-3"}, "memory_gib="),
        ({"layers": "all", "colour": 1}, "colour"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    model = mlps()
    with pytest.raises(UsageError, match=said):
        swap.train(model, **settings)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("one_rank")
def test_a_model_of_megatron() -> None:
    plain, model = model_of(), model_of()
    model.load_state_dict(plain.state_dict())
    train_megatron(plain, torch.optim.SGD(plain.parameters(), 0.1), 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with swap.train(model, optimizer, layers="all", min_mib=0.001) as run:
        train_megatron(model, optimizer, 2)
        assert run.stats().out_bytes
        assert run.stats().num_steps == 2
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    with pytest.raises(UsageError, match="this is a Megatron model: weights= and a policy are for others"):
        swap.train(model, weights="all")
    with pytest.raises(UsageError, match="recompute="):
        swap.train(model, layers="all", recompute=("nothing",))
