"""Frozen weights that others unfreeze, change or move while adapters train, and errors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import SwapError, UsageError
from tests.frozen_models import Adapted, Model, SelfCheckpointing, data, make, train
from tests.lazy_device import LazyDevice
from tests.weight_models import num_hooks


def loss_of(model: Model, seed: int = 0) -> torch.Tensor:
    return model(data(model, seed)).square().mean()


def test_an_unfrozen_weight_is_told_before_anything_runs() -> None:
    model = make()
    ran: list[int] = []
    model.first.register_forward_hook(lambda *_: ran.append(1))
    with swap.weights(model, training=True):
        for parameter in (model.layers[1].up.weight, model.layers[1].scale):
            parameter.requires_grad_(True)
        with pytest.raises(UsageError, match=r"layers.1.scale, layers.1.up.weight: requires gradients now.*Freeze it"):
            model(data(model, 0))
        with pytest.raises(UsageError, match="requires gradients now"):
            model.layers[1](torch.randn(2, 16))
        assert not ran
        model.layers[1].up.weight.requires_grad_(False)
        model.layers[1].scale.requires_grad_(False)
        train(model)


@pytest.mark.parametrize("layer", [Adapted, SelfCheckpointing])
def test_a_change_between_forward_and_backward_is_an_error_as_in_pytorch(layer: Callable[[int], nn.Module]) -> None:
    """PyTorch does not see it if the weight is needed only by what a checkpoint runs again, swapped or not."""
    errors = []
    for is_swapped in (False, True):
        model = make(layer)
        with swap.weights(model, training=True) if is_swapped else torch.enable_grad():
            loss = loss_of(model)
            with torch.no_grad():
                model.layers[1].up.weight.mul_(2)
            try:
                loss.backward()
            except RuntimeError as error:
                errors.append(str(error))
    assert len(errors) == (2 if layer is Adapted else 0)
    assert all("modified by an inplace operation" in error for error in errors)
    assert layer is SelfCheckpointing or errors[1].startswith("layers.1.up.weight, frozen and swapped")


@pytest.mark.parametrize("kind", ["state dict", "in place"])
def test_a_change_between_steps_holds_from_the_next_forward_on(kind: str) -> None:
    model, other = make(), make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)

    def change(changed: Model) -> None:
        if kind == "state dict":
            changed.load_state_dict(other.state_dict())
        else:
            with torch.no_grad():
                for layer in changed.layers:
                    layer.up.weight.mul_(1.5)

    alone = copy.deepcopy(model)
    device = LazyDevice()
    with swap.weights(model, training=True, device=device):
        for changed in (alone, model):
            train(changed)
            change(changed)
        assert train(model) == train(alone)
    assert train(model) == train(alone)
    assert device.violations == []


@pytest.mark.parametrize("before_backward", [False, True])
def test_replaced_weights_are_told_and_kept(before_backward: bool) -> None:
    """As peft's merge with safe_merge replaces them."""
    model = make()
    with swap.weights(model, training=True):
        loss = loss_of(model)
        replaced = model.layers[1].up.weight.data * 2
        if before_backward:
            model.layers[1].up.weight.data = replaced
            with pytest.raises(SwapError, match=r"layers.1.up.weight: replaced or moved"):
                loss.backward()
        else:
            loss.backward()
            model.layers[1].up.weight.data = replaced
        with pytest.raises(SwapError, match=r"layers.1.up.weight: replaced or moved.*merged adapters"):
            loss_of(model)
    assert model.layers[1].up.weight.data_ptr() == replaced.data_ptr()


def test_a_backward_after_close_is_told() -> None:
    model = make()
    with swap.weights(model, training=True):
        loss = loss_of(model)
    with pytest.raises(SwapError, match=r"backward of layers.4 needs its weights.*Close it after the last backward"):
        loss.backward()
    train(model)


def test_activations_come_second() -> None:
    model = make()
    with swap.activations(list(model.layers), "0-1", min_mib=0):
        with pytest.raises(UsageError, match=r"layers.0 has swapped activations.*call swap.weights before"):
            swap.weights(model, training=True)
        train(model)
    with swap.weights(model, training=True), swap.activations(list(model.layers), "0-1", min_mib=0):
        train(model)


class Special(nn.Parameter):
    """A tensor subclass that is more than memory."""


def with_subclass(requires_grad: bool) -> Model:
    model = make()
    model.layers[1].a.weight = Special(torch.randn(2, 16), requires_grad)
    return model


def compiled() -> Model:
    model = make()
    model.layers[2].up.compile()
    return model


@pytest.mark.parametrize(("prepare", "choose", "said"), [
    (lambda: make().requires_grad_(True), lambda m: m.layers,
     r"no frozen parameters of their own.*Freeze the base weights before"),
    (lambda: with_subclass(False), lambda m: m.layers, r"layers.1.a.weight is a Special.*Leave that layer out"),
    (lambda: nn.Linear(4, 4).requires_grad_(False), lambda m: None, r"Linear has no nn.ModuleList.*layers=\[model"),
    (compiled, lambda m: m.layers, r"layers.2 is compiled \(Linear\).*Train it uncompiled"),
])  # fmt: skip
def test_what_cannot_work_is_told(prepare: Callable[[], Any], choose: Callable[[Any], Any], said: str) -> None:
    model = prepare()
    with pytest.raises(UsageError, match=said):
        swap.weights(model, choose(model), training=True)
    assert num_hooks(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_without_training_the_way_to_train_is_told() -> None:
    model = make().eval()
    with swap.weights(with_subclass(True), training=True) as swapped:  # a trained special weight stays
        assert swapped.stats.stayed_bytes > 0
    with swap.weights(model), pytest.raises(UsageError, match=r"pass training=True to swap\.weights"):
        model(data(model, 0))
    with pytest.raises(UsageError, match="or pass training=True"):
        swap.weights(model.train())
