"""``install`` in a process that is interrupted, forks, or has two models: the loop goes on, equal to the bit."""

import gc
import os
import traceback
from collections.abc import Callable

import pytest
import torch
from megatron import swap
from torch import nn

from tests.unit.run.test_install import MASK, POSITIONS, SMALL, TOKENS, model_of, one_rank, train, untouched

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds a model for machines without CUDA")
__all__ = ["one_rank"]


class Cell:
    """A model, its optimizer and what a notebook's cells do with them."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = model_of()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def loss(self) -> torch.Tensor:
        return self.model(TOKENS[:, :-1], POSITIONS, MASK, labels=TOKENS[:, 1:]).mean()

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def in_forward(cell: Cell) -> None:
    layer = cell.model.decoder.layers[2].mlp
    hook = layer.register_forward_pre_hook(interrupt)
    try:
        cell.loss()
    finally:
        hook.remove()


def in_backward(cell: Cell) -> None:
    layer = cell.model.decoder.layers[1].mlp
    hook = layer.register_forward_hook(lambda module, inputs, output: output[0].register_hook(interrupt) and None)
    try:
        cell.loss().backward()
    finally:
        hook.remove()


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, two))


@pytest.mark.parametrize("place", [in_forward, in_backward])
def test_a_cell_that_was_interrupted_goes_on(place: Callable[[Cell], None]) -> None:
    """The user runs the cell again, without another ``install``: as without swapping, to the bit."""
    plain, cell = Cell(), Cell()
    with swap.install(cell.model, cell.optimizer, layers="all", config=SMALL) as swapped:
        for one in (plain, cell):
            train(one.model, one.optimizer)
            with pytest.raises(KeyboardInterrupt):
                place(one)
            train(one.model, one.optimizer, 2)
        assert swapped.stats().out_bytes > 0
        gc.collect()
    assert same(plain.weights(), cell.weights())
    assert untouched(cell.model)


def test_two_models_of_one_process_are_swapped_side_by_side() -> None:
    plain, cells = [Cell(), Cell()], [Cell(), Cell()]
    sessions = [swap.install(cell.model, cell.optimizer, layers="all", config=SMALL) for cell in cells]
    for one, two in ((plain[0], plain[1]), (cells[0], cells[1])):
        losses = [one.loss(), two.loss()]
        for loss in losses:
            loss.backward()
        train(one.model, one.optimizer)
        train(two.model, two.optimizer, 2)
    for session in reversed(sessions):
        assert session.stats().out_bytes > 0
        session.close()
    for mine, theirs in zip(cells, plain, strict=True):
        assert same(mine.weights(), theirs.weights())


def forked(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork of this process. Returns the exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("holds_graph", [False, True])
def test_a_fork_behind_install_disturbs_nobody(holds_graph: bool) -> None:
    """As data loaders fork. The child uses tensors of its own, and drops what it has inherited: also a graph."""
    plain, cell = Cell(), Cell()

    def step(one: Cell, child: Callable[[], None] | None) -> None:
        one.optimizer.zero_grad()
        loss = one.loss()
        kept = [loss] if holds_graph else []
        if child is not None:

            def work() -> None:
                kept.clear()
                child()

            assert forked(work) == 0
        loss.backward()
        one.optimizer.step()

    with swap.install(cell.model, cell.optimizer, layers="all", config=SMALL):
        for _ in range(2):
            step(plain, None)
            step(cell, lambda: nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward())
    assert same(plain.weights(), cell.weights())
