"""``swap.train``: one call for models of PyTorch and of Megatron."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.devices.base import Owner
from megatron.swap.engine.policy import ManualPolicy
from megatron.swap.models.hints import ModelHints
from tests.plain_loop import Mlp, mlps, train
from tests.planned_loop import QUIET
from tests.unit.run.test_install import model_of, one_rank  # noqa: F401
from tests.unit.run.test_install import train as train_megatron


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
    with pytest.raises(UsageError, match=r"no layers were found in InADict.*swap.train\(model, hints=\[model.block1"):
        swap.train(model, **settings)
    layers = list(model.blocks.values())
    hints = layers if "layers" in settings else ModelHints(model, layers)
    with swap.train(model, hints=hints, **settings, **QUIET) as run:
        assert train(model, num_steps=3).same_as(plain)
        assert len(run.layers) == 4
        assert run.stats().out_bytes
    assert run.layers == ()
    with swap.train(model, layers=ManualPolicy((1,), (), 0), hints=hints, **QUIET) as run:  # they serve twice
        train(model, num_steps=1)
    assert run.chosen == (1,)


def untouched(model: nn.Module) -> None:
    assert not any({"forward", "__reduce_ex__"} & set(vars(module)) for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_what_cannot_be_changed_is_refused_and_nothing_else_was() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        use_cache: bool = True

    model = mlps()
    model.gradient_checkpointing, model.config = True, Config()
    with pytest.raises(UsageError, match=r"Config\.use_cache is on, .* cannot be changed .* Set it to False"):
        swap.train(model, memory_gib=1.0)
    assert model.gradient_checkpointing
    untouched(model)
    model = nn.Sequential(Mlp(), nn.Sequential(nn.ReLU(), nn.LazyLinear(model[0].up.in_features)), Mlp())
    with pytest.raises(UsageError, match=r"layer 1 of Sequential .*\(LazyLinear\)\. Run the model once before\."):
        swap.train(model, layers="all")
    model(torch.ones(4, model[0].up.in_features))
    untouched(model)

    class Final(nn.Sequential):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "forward":
                raise TypeError("final")
            super().__setattr__(name, value)

    inside, outside = nn.Sequential(Mlp(), Final(Mlp()), Mlp(), Mlp()), Final(*mlps())
    for settings, model in (({"layers": "all"}, inside), ({"memory_gib": 1.0}, outside)):
        with pytest.raises(TypeError, match="final"):
            swap.train(model, **settings, **QUIET)
        untouched(model)


def test_a_failure_while_it_begins_leaves_the_model_as_it_was() -> None:
    """The planner's first line is printed when the boundaries are there."""
    def log(line: str) -> None:
        raise OSError("no room")

    model = mlps()
    for _ in range(2):
        with pytest.raises(OSError, match="no room"):
            swap.train(model, memory_gib=1.0, min_mib=0, host_gib=0.1, log=log)
        untouched(model)
    copy.deepcopy(model)
    with pytest.raises(UsageError, match="log 'x': must be a function"):
        swap.train(model, memory_gib=1.0, log="x")  # type: ignore[arg-type]


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
        # On one device, so that weights go first.
        assert set(run.run_device.device.copier._last["in"]) == {Owner.WEIGHTS, Owner.ACTIVATIONS}
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"nothing is to be swapped. Give memory_gib=60 .*, layers=.0-9. .* or weights"),
        ({"layers": "all", "host_gib": 1e-9}, "less than a page of host memory may be reserved"),
        ({"layers": "all", "hints": 3}, "hints=3: must be a list of the model's layers, or a ModelHints"),
        ({"layers": "all", "hints": [nn.Linear(2, 2)]}, "hints= must be made for this model"),
        ({"layers": "none"}, "none of the 6 layers would be swapped"),
        ({"layers": "all", "modules": ("mlp",)}, r"modules=\('mlp',\) is for Megatron models"),
        ({"memory_gib": 1.0, "layers": "0-3"}, "memory_gib="),
        ({"layers": "all", "optimizer_state": 0.5}, "optimizer_state=0.5 is for Megatron models"),
        ({"layers": "all", "save_plan": "plan.json"}, "give memory_gib too"),
        ({"layers": "all", "weights": "none"}, "names no layer"),
        ({"layers": "all", "optimizer": "adam"}, "optimizer: str has no step"),
        ({"memory_gib": 1.0, "optimizer": torch.optim.SGD}, "optimizer: SGD is a class"),
        ({"memory_gib": 1.0, "layers": ManualPolicy((1,), (), 0)}, "a policy beside memory_gib"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], said: str) -> None:
    model = mlps()
    with pytest.raises(swap.SwapError, match=said):
        swap.train(model, **settings)
    untouched(model)


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
    with swap.train([model], optimizer, layers="all", min_mib=0.001):
        pass
    with pytest.raises(UsageError, match="one model chunk is given twice"):
        swap.train([model, model], layers="all")
    with pytest.raises(UsageError, match=r"optimizer_state=2.0"):
        swap.train(model, layers="all", optimizer_state=2.0)
    with pytest.raises(UsageError, match="this is a Megatron model: weights= and a policy are for others"):
        swap.train(model, weights="all")
    with pytest.raises(UsageError, match="recompute="):
        swap.train(model, layers="all", recompute=("nothing",))
