"""``autocast_cache=False``: within the layers autocast keeps no casts of weights, as with ``cache_enabled=False``."""

import copy
from collections.abc import Callable

import pytest
import torch
from megatron import swap
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.types import GIB
from tests.plain_loop import WIDTH, Mlp, rows, train
from tests.planned_loop import NUM_STEPS, QUIET, check, unswapped


def under_autocast(model: nn.Module, batch: torch.Tensor, step: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = model(batch).float().square().mean()
    loss.backward()
    return loss


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class UsedTwice(nn.Module):
    """Its weights have two uses: with the cache their casts' gradients are added in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(hidden))  # type: ignore[no-any-return]


class Checkpointed(UsedTwice):
    """The same within a checkpoint, which runs again in backward."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)  # type: ignore[no-any-return]


def shared() -> nn.Module:
    """A layer that runs twice in a forward, and two layers that share a weight."""
    one, twice, other = Mlp(), Mlp(), Mlp()
    other.up.weight = one.up.weight
    return Stack(one, twice, Mlp(), twice, other)


def reference(model: nn.Module) -> nn.Module:
    """Return a copy whose layers run with the cache off."""
    copied = copy.deepcopy(model)
    assert isinstance(copied.layers, nn.ModuleList)
    for layer in dict.fromkeys(copied.layers):
        layer.register_forward_pre_hook(lambda *_: torch.set_autocast_cache_enabled(False))
        layer.register_forward_hook(lambda *_: torch.set_autocast_cache_enabled(True))
    return copied


MODELS: dict[str, Callable[[], nn.Module]] = {
    "used twice": lambda: Stack(Mlp(), UsedTwice(), Mlp(), Mlp(), UsedTwice()),
    "checkpointed": lambda: Stack(Mlp(), Checkpointed(), Mlp(), Checkpointed()),
    "shared": shared,
}


@pytest.mark.parametrize(("name", "fraction"), [
    ("used twice", 0.35), ("shared", 0.35), pytest.param("checkpointed", 0.65, marks=pytest.mark.slow),
])  # fmt: skip
def test_as_layers_whose_cache_is_off(name: str, fraction: float) -> None:
    """Losses, gradients and weights to the bit, also where nothing is swapped."""
    torch.manual_seed(3)
    model = MODELS[name]()
    plain, full_gib = unswapped(reference(model), rows, backward=under_autocast)
    for part in (2.0, fraction):
        copied = copy.deepcopy(model)
        with swap.activations(copied, memory_gib=part * full_gib, autocast_cache=False, **QUIET) as swapped:
            trained = train(copied, rows, NUM_STEPS, under_autocast)
            check(swapped.stats())
        assert trained.same_as(plain)
    assert torch.is_autocast_cache_enabled()


def test_casts_take_no_memory_beside_the_layers() -> None:
    """With few rows nearly all that is saved is casts of weights. A third of them is more than is needed."""
    torch.manual_seed(3)
    model = Stack(*(Mlp(64) for _ in range(8)), width=64)

    def few(step: int) -> torch.Tensor:
        return torch.randn(2, 64, generator=torch.Generator().manual_seed(step))

    casts_gib = sum(one.numel() for one in model.layers.parameters()) * 2 / GIB
    plain = train(copy.deepcopy(model), few, NUM_STEPS, under_autocast)
    with swap.activations(model, memory_gib=casts_gib / 3, autocast_cache=False, **QUIET) as swapped:
        assert train(model, few, NUM_STEPS, under_autocast).same_as(plain)  # each weight has one use
        check(swapped.stats())
