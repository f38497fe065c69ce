"""Swapped weights that other code reads, writes or moves, and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import MIB, SwapError, UsageError
from megatron.swap.devices.base import Device
from megatron.swap.memory.host_memory import HostCapacity, HostMemoryError
from megatron.swap.params import module_weights
from tests.weight_models import Stack, convolutions, mlp, num_hooks, picture


def test_a_state_dict_in_between(device: Device) -> None:
    model, x = convolutions()
    model.eval()
    right = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad(), swap.weights(model, model.layers, device=device):
        states = [model.state_dict()]
        for _ in range(2):
            model(x)
            states.append(model.state_dict())
    for state in states:  # also those that are older than what came since
        assert state.keys() == right.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in right.items())


def test_a_state_dict_is_loaded_in_between(device: Device) -> None:
    (model, x), (other, _) = mlp(3), mlp(3)
    model.eval()
    other.eval()
    with torch.no_grad():
        with swap.weights(model, model.layers, device=device):
            model(x)  # the last two layers are in the buffers, or on their way
            model.load_state_dict(other.state_dict())
            assert torch.equal(model(x), other(x))
            model.state_dict()["layers.0.0.weight"].mul_(2)
            other.layers[0][0].weight.mul_(2)
            assert torch.equal(model(x), other(x))
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("assign", [False, True])
def test_what_was_moved_in_between_is_told(assign: bool) -> None:
    model, x = mlp()
    model.eval()
    with torch.no_grad(), swap.weights(model, model.layers):
        model(x)
        if assign:
            model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        else:
            model.double()
            x = x.double()
        with pytest.raises(SwapError, match=r"layers.0.0.weight, layers.0.0.bias: replaced or moved"):
            model(x)
    with torch.no_grad():
        model(x)  # it stays as they have made it
    assert model.layers[0][0].weight.dtype == (torch.float32 if assign else torch.float64)


class Failing(nn.Module):
    """A layer that runs ``what`` once, if there is any."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.what: Callable[[nn.Module], Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        what, self.what = self.what, None
        if what is not None:
            found = what(self)
            if found is not None:
                return found
        return self.linear(x)


def failing() -> tuple[Stack, torch.Tensor]:
    return Stack([Failing() for _ in range(4)], nn.Linear(4, 16), nn.Linear(16, 3)).eval(), torch.randn(2, 4)


def interrupt(_: nn.Module) -> None:
    raise KeyboardInterrupt


def fail(_: nn.Module) -> None:
    raise ArithmeticError("of the layer")


@pytest.mark.parametrize(("what", "error", "said"), [
    (fail, ArithmeticError, "of the layer"),
    (interrupt, KeyboardInterrupt, None),
    (lambda layer: layer.linear.weight[:2].view(-1)[:32].view(2, 16), SwapError, "layers.1 returns a view"),
], ids=["exception", "interrupt", "view"])  # fmt: skip
def test_after_an_error_in_a_layer(
    what: Callable[[nn.Module], Any], error: type[BaseException], said: str | None, device: Device
) -> None:
    model, x = failing()
    before = picture(model)
    with torch.no_grad():
        expected = model(x)
        with swap.weights(model, model.layers, device=device):
            for _ in range(2):
                model.layers[1].what = what
                with pytest.raises(error, match=said):
                    model(x)
                for _ in range(2):
                    assert torch.equal(model(x), expected)
    assert picture(model) == before


def test_what_is_loaded_after_an_interrupt_is_kept(device: Device) -> None:
    (model, x), (other, _) = failing(), failing()
    with torch.no_grad():
        expected = other(x)
        with swap.weights(model, model.layers, device=device):
            for number in (2, 1):  # each leaves a layer on a buffer, of which there are two
                model.layers[number].what = interrupt
                with pytest.raises(KeyboardInterrupt):
                    model(x)
            model.load_state_dict(other.state_dict())
            assert torch.equal(model(x), expected)
        assert torch.equal(model(x), other(x))


def test_gradients_and_training_are_refused_before_anything_runs() -> None:
    model, x = convolutions()
    model.eval()
    ran: list[int] = []
    model.first.register_forward_hook(lambda *_: ran.append(1))
    with swap.weights(model, model.layers):
        with pytest.raises(UsageError, match=r"gradients on.*torch.no_grad\(\) or torch.inference_mode\(\)"):
            model(x)
        with pytest.raises(UsageError, match="gradients on"):
            model.layers[1](torch.randn(2, 4, 6, 6))
        model.train()
        with torch.no_grad(), pytest.raises(UsageError, match=r"layers.0 is in training mode.*model.eval\(\)"):
            model(x)
        assert not ran
        model.eval()
        with torch.no_grad():
            model(x)


class Special(nn.Parameter):
    """A tensor subclass that is more than memory."""


def ready() -> Stack:
    return mlp()[0].eval()


def on_meta() -> Stack:
    with torch.device("meta"):
        return ready()


def with_subclass() -> Stack:
    model = ready()
    model.layers[1][0].weight = Special(torch.randn(16, 16))
    return model


@pytest.mark.parametrize(("make", "choose", "said"), [
    (lambda: torch.ones(3), lambda _: [], "takes a torch.nn.Module, not Tensor"),
    (ready, lambda _: [], "layers= is empty"),
    (ready, lambda _: 3, "layers= is a int: give several modules"),
    (ready, lambda _: [nn.Linear(2, 2)], "layers= has a Linear that is no module of this Stack"),
    (ready, lambda m: [m.layers[1], m.layers[1][0]], "layers.1.0 is inside layers.1: name one"),
    (ready, lambda m: [m.layers[0][1]], "have no weights of their own"),
    (lambda: mlp()[0], lambda m: m.layers, r"layers.0 is in training mode.*Call model.eval\(\)"),
    (on_meta, lambda m: m.layers, r"first.weight is on the meta device.*to_empty\(device='cpu'\)"),
    (torch.inference_mode()(ready), lambda m: m.layers, r"layers.0.0.weight was made under torch.inference_mode"),
    (with_subclass, lambda m: m.layers, r"layers.1.0.weight is a Special, .* than plain.*Leave that layer out"),
])  # fmt: skip
def test_what_cannot_work_is_told(make: Callable[[], Any], choose: Callable[[Any], Any], said: str) -> None:
    model = make()
    with pytest.raises(UsageError, match=said):
        swap.weights(model, choose(model))
    if isinstance(model, nn.Module):
        assert num_hooks(model) == 0


def test_nested_and_closed() -> None:
    model, x = mlp()
    model.eval()
    swapped = swap.weights(model, model.layers[:2])
    for layers in (model.layers[:2], model.layers[2:]):
        with pytest.raises(UsageError, match=r"layers.0 is swapped already|this module is swapped already"):
            swap.weights(model, layers)
    with torch.no_grad():
        model(x)
    swapped.close()
    swapped.close()
    with pytest.raises(UsageError, match=r"closed: call swap.weights again"), swapped:
        pass
    with swap.weights(model, model.layers):
        pass


def test_host_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = mlp(5, 256)
    model.eval()
    with pytest.raises(HostMemoryError, match=r"5 layers take 1.27 MiB.*1.00 MiB may be taken.*raise host_gib="):
        swap.weights(model, model.layers, host_gib=1 / 1024)
    with pytest.raises(UsageError, match=r"host_gib=-1: a number of GiB is expected, 0 or more"):
        swap.weights(model, model.layers, host_gib=-1)
    monkeypatch.setattr(module_weights, "safe_host_bytes", lambda _: HostCapacity(MIB, MIB, None, MIB // 8, "little"))
    with swap.weights(model, model.layers):  # they make room for themselves
        pass
    monkeypatch.setattr(module_weights, "safe_host_bytes", lambda _: HostCapacity(MIB, MIB, None, -MIB, "nothing"))
    with pytest.raises(HostMemoryError, match=r"may be taken \(nothing; plus the host memory that they occupy"):
        swap.weights(model, model.layers)
