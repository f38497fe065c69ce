"""Layers that must not run again in backward: none of them is recomputed whole, or an error says so."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import UsageError
from megatron.swap.engine.layer_state import StateReader
from megatron.swap.engine.run_snapshot import RunSnapshot
from megatron.swap.planning.consensus import Ranks
from tests.plain_loop import WIDTH, Mlp, assert_equal, loss_of, mlps, rows, train
from tests.planned_loop import QUIET, assert_planned, recompute_all


class Layer(Mlp):
    """A layer with a buffer, a list beside its hidden states, and something that it does in each run."""

    def __init__(self, does: Callable[[Any, torch.Tensor, list[Any]], object]) -> None:
        super().__init__()
        self.does = does
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor, states: list[Any], noise: torch.Tensor | None = None) -> torch.Tensor:
        self.does(self, hidden, states)
        hidden = super().forward(hidden) * self.scale
        return hidden if noise is None else hidden + noise


CHANGES: dict[str, Callable[[Any, torch.Tensor, list[Any]], object]] = {
    "a buffer's data": lambda layer, *_: layer.scale.data.mul_(1.01),
    "the input": lambda layer, hidden, states: hidden.detach().add_(0),
    "an attribute": lambda layer, hidden, _: setattr(layer, "last", hidden),
    "a list": lambda layer, hidden, states: states.append(hidden),
    "an item of a list": lambda layer, hidden, states: states.__setitem__(0, hidden),
    "Python's random": lambda *_: random.random(),
    "NumPy's random": lambda *_: np.random.rand(),  # noqa: NPY002
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_found(what: str) -> None:
    layer, hidden, states = Layer(CHANGES[what]), rows(0), [None]
    before = RunSnapshot(StateReader(layer), (hidden,), {"states": states})
    assert before.is_unchanged()
    layer(hidden, states)
    assert not before.is_unchanged()


class Model(nn.Module):
    """Its layers share a list, and get a tensor that autograd does not save."""

    def __init__(self, does: Callable[[Any, torch.Tensor, list[Any]], object] = lambda *_: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(does) for _ in range(5)])
        self.noise = torch.ones(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states: list[Any] = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, states, self.noise)
        return hidden + sum(state.mean() for state in states)


class Sloped(Mlp):
    """A layer that takes a gradient in its forward, for which backward needs a second one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        result = super().forward(hidden)
        (slope,) = torch.autograd.grad(result.square().sum(), hidden, create_graph=True)
        return result + 0.1 * slope


def twice(model: nn.Module, data: torch.Tensor, _: int) -> torch.Tensor:
    loss = loss_of(model(data))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


class Recursive(Mlp):
    """A layer that runs three times, by calling itself twice in a call."""

    def forward(self, hidden: torch.Tensor, is_outer: bool = True) -> torch.Tensor:
        hidden = super().forward(hidden)
        return self(self(hidden, False), False) if is_outer else hidden


def recursive() -> nn.Sequential:
    return nn.Sequential(*(Recursive() for _ in range(4)))


class Calling(Mlp):
    """A layer that calls the one before it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before: list[nn.Module] = self.before  # type: ignore[assignment]
        return super().forward(hidden + sum(one(hidden) for one in before))


def calling() -> nn.Sequential:
    model = nn.Sequential(*(Calling() for _ in range(4)))
    for number, layer in enumerate(model):
        layer.before = [*model[max(0, number - 1) : number]]
    return model


@pytest.mark.parametrize(
    ("make", "backward"),
    [(lambda: nn.Sequential(*(Sloped() for _ in range(4))), None), (mlps, twice), (recursive, None), (calling, None)],
    ids=["a gradient in forward", "two backwards", "calls itself", "calls another"],
)  # fmt: skip
def test_layers_are_recomputed_as_often_as_backward_needs_them(make: Callable[[], nn.Module], backward: Any) -> None:
    torch.manual_seed(7)
    model = make()
    plain = train(copy.deepcopy(model), num_steps=2, backward=backward)
    with swap.activations(model, memory_gib=1.0, **QUIET) as swapped:
        assert swapped.auto is not None
        recompute_all(swapped)
        assert train(model, num_steps=2, backward=backward).same_as(plain)


class TwoStates(nn.Module):
    """A layer of two hidden states, none of which its operators save; what it feeds to ``mix`` can be made from one and
    from a sum that a dropped output has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, states: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = states
        both = first + second
        mixed = torch.cat([both, first], -1)[:, ::2]
        nn.functional.layer_norm(both, (WIDTH,))
        result = self.mix(mixed)
        second = self.mix(result)
        return nn.functional.layer_norm(first + second + self.out(result), (WIDTH,)), second


class OfTwoStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(TwoStates() for _ in range(5)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers((hidden, hidden))[0]


def test_layers_of_two_hidden_states_that_they_do_not_save() -> None:
    assert_planned(OfTwoStates, fractions=(0.7,), tolerance=0.1)


def test_a_layer_that_calls_itself_is_one_layer() -> None:
    assert_equal(recursive)
    assert_planned(recursive, fractions=(0.6,))


def test_a_tensor_that_is_changed_after_the_layer_is_refused() -> None:
    """It needs no gradient and is not saved, so plain training may change it."""
    model = Model()
    with swap.activations(model, memory_gib=1.0, **QUIET) as swapped:
        recompute_all(swapped)
        result = model(rows(0))
        model.noise.mul_(2)
        with pytest.raises(UsageError, match=r"layer 4 .* runs again in backward, but an argument changed"):
            result.sum().backward()


def test_layers_outside_the_forward_of_the_model() -> None:
    """Nothing would be planned: nobody sees the forward begin."""
    model = Model()
    layer = lambda: model.layers[0](rows(0), [])  # noqa: E731
    with swap.activations(model, memory_gib=1.0, **QUIET):
        with pytest.raises(UsageError, match=r"Layer.* runs, but not through .*: pass the module that your loop calls"):
            layer()
        with pytest.raises(UsageError, match=r"Model.forward is called by itself: call the model"):
            model.forward(rows(0))
        with torch.no_grad():
            layer()
            model.forward(rows(0))
        model(rows(0)).sum().backward()


def test_several_forwards_before_a_backward() -> None:
    def chosen_and_rejected(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        loss = loss_of(model(batch)) - loss_of(model(batch + 1))
        loss.backward()
        return loss

    def dropped(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        model(batch + 1)
        loss = loss_of(model(batch))
        loss.backward()
        return loss

    def of_one_layer(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        losses.append(loss_of(model(batch)))
        losses[-1].backward(inputs=list(model[-1].parameters()))
        return losses[-1]

    losses: list[torch.Tensor] = []
    model = mlps(3)
    with swap.activations(model, memory_gib=1.0, **QUIET):
        with pytest.raises(UsageError, match=r"backward after each forward, concatenate the batches .*del loss"):
            train(model, backward=chosen_and_rejected)
        train(model, backward=dropped)
    with swap.activations(model := mlps(3), memory_gib=1.0, **QUIET):
        train(model, num_steps=2, backward=of_one_layer)


@pytest.mark.parametrize(("other", "said"), [
    (["0", "2", "1"], r"run 1 of the longest forward is of 1 on rank 0, and of 2 on rank 1"),
    (["0", "1"], r"run 2 of the longest forward is of 2 on rank 0, and of none on rank 1"),
])  # fmt: skip
def test_ranks_that_run_different_layers(monkeypatch: pytest.MonkeyPatch, other: list[str], said: str) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda _, compute: [compute(), other])
    model = mlps(3)
    with swap.activations(model, memory_gib=1.0, **QUIET), pytest.raises(UsageError, match=said):
        train(model, num_steps=2)


class Recurrent(nn.Module):
    """Its kernel saves a workspace, and leaves a part of it unset."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.LayerNorm(WIDTH), nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.cell(self.norm(hidden).unsqueeze(1))[0].squeeze(1)


def test_a_workspace_of_a_kernel_is_not_compared() -> None:
    model = nn.Sequential(*(Recurrent() for _ in range(4)))
    plain = train(copy.deepcopy(model), num_steps=12)
    with swap.activations(model, memory_gib=1.0, **QUIET) as swapped:
        recompute_all(swapped)
        assert train(model, num_steps=12).same_as(plain)
