"""Which saved tensors are compared: a difference in any other one shows in them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from megatron.swap.engine.recomputed_run import seeing_saved
from megatron.swap.operators.compared import Flow, Saved, compared
from megatron.swap.operators.records import OperatorWatch
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

WIDTH, NUM_ROWS = 64, 32


def saved_by(layer: nn.Module, *more: torch.Tensor) -> tuple[list[torch.Tensor], list[int], list[int]]:
    """Run ``layer``. Return the tensors that it saves, and the places of those that are compared, last and in turn."""
    hidden, tensors = torch.randn(NUM_ROWS, WIDTH, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        watch = OperatorWatch(_Unwatched(), [*layer.parameters(), hidden, *more])  # type: ignore[arg-type]
        with watch, seeing_saved(lambda tensor: (tensors.append(tensor.detach()), watch.saves(tensor))):
            result = layer(hidden, *more)
        assert result.requires_grad
        places = watch.end().compared
    assert places is not None
    return tensors, sorted(places.last), sorted(places.all)


class _Unwatched:
    unwatched = None


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Parallel(Mlp):
    """Two branches side by side: none is computed from the other."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + super().forward(hidden) + torch.tanh(self.norm(hidden))


class Normed(Mlp):
    """A norm comes last. Its statistics are saved, and they hide what they sum."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(hidden))


class Reading(Mlp):
    def forward(self, hidden: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * factor


class OfGlobal(Mlp):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * GLOBAL


GLOBAL = torch.full((NUM_ROWS, WIDTH), 2.0)


def test_which_tensors_of_a_layer_are_compared() -> None:
    tensors, last, in_turn = saved_by(Mlp())
    assert [tensors[place].shape for place in last] == [(NUM_ROWS, 4 * WIDTH)], "the last product of a stack"
    assert set(last) < set(in_turn)
    tensors, last, _ = saved_by(Parallel())
    assert sorted(tensors[place].shape[1] for place in last) == [WIDTH, 4 * WIDTH], "each branch has one"
    tensors, last, _ = saved_by(Normed())
    assert (NUM_ROWS, WIDTH) in [tensors[place].shape for place in last], "statistics do not stand for what they sum"
    factor = torch.rand(NUM_ROWS, WIDTH)
    tensors, last, in_turn = saved_by(Reading(), factor)
    is_compared = [torch.equal(tensors[place], factor) for place in (*last, *in_turn)]
    assert not any(is_compared), "arguments are compared in other ways"
    tensors, last, _ = saved_by(OfGlobal())
    from_outside = [torch.equal(tensors[place], GLOBAL) for place in last if tensors[place].shape == GLOBAL.shape]
    assert any(from_outside)


def test_one_tensor_is_compared_once_and_each_part_of_a_storage() -> None:
    saved = [Saved(0, (0,)), Saved(0, (0,)), Saved(0, (8,)), Saved(None, ()), Saved(1, (0,), is_opaque=True)]
    found: Any = compared([Flow({}, {0: 16}), Flow({}, {1: 1})], saved, num_given=0)
    assert found.last == found.all == {0, 2, 3}
    found = compared([Flow({}, {0: 4}), Flow({0: 4}, {1: 4})], [Saved(0, ())], num_given=0)
    assert found.last == {0}, "it does not show in what nobody saves"


def test_what_is_written_in_place_shows_itself_only_if_it_is_read() -> None:
    flows = [Flow({-1: 8}, {0: 8}), Flow({0: 8, 1: 8}, {0: 8})]
    assert compared(flows, [Saved(0, ()), Saved(1, ())], num_given=1).last == {0}
