"""Kinds of failures that public reports name (``reports.toml``) and that no other test has: as programs."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from megatron.swap.common.types import UsageError
from tests.plain_loop import ALL, Cnn, Mlp, images, loss_of, rows, train
from tests.planned_loop import NUM_STEPS, QUIET, unswapped

WIDTH = 32
Backward = Callable[[nn.Module, Any, int], torch.Tensor]


def check(
    make: Callable[[], nn.Module], data: Callable[[int], Any] = rows, backward: Backward | None = None, *,
    fraction: float,
) -> str:  # fmt: skip
    """Check that training is equal to the bit with every layer offloaded, and within a budget. Return the plan."""
    torch.manual_seed(7)
    model = make()
    plain, full_gib = unswapped(model, data, NUM_STEPS, backward=backward)
    copied = copy.deepcopy(model)
    with swap.activations(copied, "all", **ALL, host_gib=0.05) as swapped:
        train(copied, data, 3, backward)
        assert swapped.stats().out_bytes > 0
    few = copy.deepcopy(model)
    train(few, data, 3, backward)
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in few.state_dict().items())
    with swap.activations(model, memory_gib=fraction * full_gib, **QUIET) as swapped:
        assert train(model, data, NUM_STEPS, backward).same_as(plain)
        stats = swapped.stats()
        assert stats.stage == "stable"
        assert stats.peak_gib is not None
        assert stats.peak_gib <= fraction * full_gib
        return swapped.plan()


# --------------------------------------------------------------------------------------------------------- layers


class TwoOutputs(torch.autograd.Function):
    """Saves its outputs, and keeps what is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        double, sine = 2 * x, x.sin()
        ctx.save_for_backward(x, double, sine)
        ctx.factor = 2
        return double, sine

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        x, double, _ = ctx.saved_tensors
        return ctx.factor * grads[0] + x.cos() * grads[1] + 0 * double


class InPlace(torch.autograd.Function):
    """Changes its input, which may be a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x.relu_())
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x > 0)


class Quantized(torch.autograd.Function):
    """A frozen weight of eight bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.scale = scale
        return x @ (weight * scale).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return grad @ (weight * ctx.scale), None, None


class EndsInFunction(Mlp):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return TwoOutputs.apply(super().forward(hidden))[0]


class ChangesView(Mlp):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden)
        InPlace.apply(up[:8])
        return hidden + self.down(up)


class EightBits(Mlp):
    """A quantized layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 127, (4 * WIDTH, WIDTH), dtype=torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(hidden) + Quantized.apply(hidden, self.weight, 1e-3)))


class InPlaceAtTheEnd(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(hidden).view(-1, 4, WIDTH // 4)).view(-1, WIDTH)[:].relu_()


class ChangesAlias(Mlp):
    """Returns a view, after a change of its base through another view."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = super().forward(hidden).view(-1, WIDTH)
        output[:8].index_add_(0, torch.tensor([0, 3]), hidden[:2])
        return output


class OfExperts(nn.Linear):
    """A change of the weights of several experts."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.weight


class AdaptedExperts(nn.Module):
    """Puts its adapter on and off in each forward, as peft does with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 8, requires_grad=False)
        self.adapter = OfExperts(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self, "experts", self.adapter)
        with parametrize.cached():
            output = hidden + sum(functional.gelu(hidden @ self.experts[number]) for number in range(2))
        parametrize.remove_parametrizations(self, "experts", leave_parametrized=False)
        return output


class Normed(Mlp):
    """Spectral norm, whose vectors change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = spectral_norm(self.up)


class Counts(Mlp):
    """Counts tokens of experts, and keeps an intermediate tensor until the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.register_buffer("tokens", torch.zeros(4))
        self.kept: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.kept = self.router(hidden).softmax(-1)
        self.tokens += self.kept.detach().sum(0)
        return super().forward(hidden) + self.kept.mean()


class Scaled(Mlp):
    """Eight bits with delayed scaling: its scale is the largest value of earlier forwards, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.history = [1.0, 1.0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = 64 / max(self.history)
        self.history = [*self.history[1:], float(hidden.detach().abs().max())]
        return super().forward(hidden + ((hidden * scale).round() / scale - hidden).detach())


class Attending(Mlp):
    def forward(self, hidden: torch.Tensor) -> Any:
        return super().forward(hidden), (hidden @ hidden.t()).softmax(-1)


class OfAll(nn.Module):
    def __init__(self, kinds: list[type[nn.Module]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for kind in kinds])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        more = 0.0
        for layer in self.layers:
            result = layer(hidden)
            hidden, attention = result if isinstance(result, tuple) else (result, None)
            more = more if attention is None else more + attention.std() + hidden.abs().mean()
        return hidden + more


def test_layers() -> None:
    """Layers that may run again: they do."""
    kinds = [EndsInFunction, ChangesView, EightBits, InPlaceAtTheEnd, ChangesAlias, Attending]
    assert "as a whole" in check(lambda: OfAll([*kinds, *kinds]), fraction=0.4)


@pytest.mark.slow
def test_layers_that_change_what_they_read() -> None:
    """Layers that never run again."""
    kinds = [Normed, Counts, Scaled, AdaptedExperts]
    assert "as a whole" not in check(lambda: OfAll([*kinds, *kinds]), fraction=0.8)


class Hooking(Mlp):
    """A layer that changes itself for the time of its forward: a hook, the mode, a stack, a tensor that it keeps.

    A checkpoint ends it at its last saved tensor, where it runs again, and it puts nothing back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.stack: list[float] = []
        self.kept: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hook = self.up.register_forward_hook(lambda _, args, result: 1.5 * result)
        self.stack.append(1.5)
        self.dropout.eval()
        self.kept = self.up(hidden)
        output = hidden + sum(self.stack) * self.down(functional.gelu(self.dropout(self.kept)))
        self.kept = None
        self.dropout.train()
        self.stack.pop()
        hook.remove()
        return output


class Scaling(Mlp):
    """A layer that changes a tensor, which cannot be put back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        version = self.scale._version
        self.scale.add_(1)
        output = super().forward(hidden) * self.scale.clone()
        self.scale.sub_(1)
        torch._C._autograd._unsafe_set_version_counter((self.scale,), (version,))
        return output


@pytest.mark.slow
def test_layers_that_change_for_the_time_of_their_forward() -> None:
    assert "as a whole" in check(lambda: OfAll([Hooking] * 4), fraction=0.4)
    with pytest.raises(UsageError, match=r"layer \d \(Scaling\) changes scale for the time of its forward, .* finally"):
        check(lambda: OfAll([Scaling] * 4), fraction=0.4)


# ------------------------------------------------------------------------------------------------ stacks and states


class Convolutions(nn.Module):
    """Convolutions behind in-place ReLUs, which save nothing of their own; then blocks with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        relus = [nn.ReLU(inplace=True) for _ in range(2)]
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), relus[0], nn.Conv2d(8, 8, 1), relus[1])
        self.down = nn.ModuleList([nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3)])
        self.control = nn.ModuleList([nn.Sequential(nn.Conv2d(8, 8, 1), nn.SiLU()) for _ in range(3)])
        self.up = nn.ModuleList([nn.Sequential(nn.Conv2d(16, 8, 1), nn.SiLU(inplace=True)) for _ in range(3)])
        self.head = Cnn()
        self.down.requires_grad_(False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(image)
        control, skips = hidden, []
        for down, more in zip(self.down, self.control, strict=True):
            hidden, control = hidden + down(hidden), more(control)
            skips.append(hidden + control)
        for up in self.up:
            hidden = up(torch.cat([hidden, skips.pop()], 1))
        return hidden  # features: the head is not used


@pytest.mark.slow
def test_skip_connections() -> None:
    check(Convolutions, images, fraction=0.7)


@pytest.mark.slow
def test_frozen_layers() -> None:
    """A frozen prefix and every second layer, whose inputs need no gradient; later a layer changes sides."""

    def make() -> nn.Module:
        model = OfAll([Mlp] * 6)
        for number in (0, 1, 3):
            model.layers[number].requires_grad_(False)
        return model

    def backward(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
        if step == NUM_STEPS // 2:
            model.layers[3].requires_grad_(True)  # type: ignore[index]
            model.layers[5].requires_grad_(False)  # type: ignore[index]
        loss = loss_of(model(batch))
        loss.backward()
        return loss

    check(make, rows, backward, fraction=0.5)


# ---------------------------------------------------------------------------------------------------------- loops


def clipped(model: nn.Module, batch: torch.Tensor, loss: torch.Tensor) -> None:
    """Backward of two micro-batches by a scaler that overflows, then clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for one in (loss, lambda: loss_of(model(batch.flip(0)))):
        scaler.scale(one if isinstance(one, torch.Tensor) else one()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def stepping(model: nn.Module, _: torch.Tensor, loss: torch.Tensor) -> None:
    """Each parameter steps inside backward, and its gradient leaves at once."""

    def step(parameter: torch.Tensor) -> None:
        torch.optim.SGD([parameter], 1e-3).step()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    loss.backward()
    for handle in hooks:
        handle.remove()


def sampling(model: nn.Module, batch: torch.Tensor, loss: torch.Tensor) -> None:
    """Samples between forward and backward, with averaged weights that are loaded for it."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model(batch.flip(0))
    loss.backward()
    model.load_state_dict({name: value * 0.9 for name, value in weights.items()})
    model.eval()
    with torch.no_grad():
        model(batch)
    model.train()
    model.load_state_dict(weights)


def evaluating(model: nn.Module, _: torch.Tensor, loss: torch.Tensor) -> None:
    """Backward in another mode than forward."""
    model.eval()
    loss.backward()
    model.train()


@pytest.mark.slow
@pytest.mark.parametrize("way", [clipped, stepping, sampling, evaluating])
def test_loops(way: Callable[[nn.Module, torch.Tensor, torch.Tensor], None]) -> None:
    class Dropping(Mlp):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().forward(hidden), 0.2, self.training)

    def backward(model: nn.Module, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = loss_of(model(batch))
        way(model, batch, loss)
        return loss

    assert "recompute" in check(lambda: OfAll([Dropping] * 4), rows, backward, fraction=0.45)
