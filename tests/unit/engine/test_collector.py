"""Garbage collections are put off as long as there is a graph, and no longer; garbage stays bounded."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.engine import (
    Engine,
    batch,
    forward,
    loss_of,
    one_after_the_other,
    one_forward_one_backward,
    stack,
    train_step,
)

OFTEN = (100, 5, 5)


@pytest.fixture(autouse=True)
def often() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*OFTEN)
    yield
    gc.set_threshold(*before)


def test_nothing_is_collected_between_forward_and_backward() -> None:
    layers, generations = stack(6), []
    with Engine(layers):
        train_step(layers, one_after_the_other(2))
        note = lambda phase, info: generations.append(info["generation"])  # noqa: E731
        gc.callbacks.append(note)
        loss = loss_of(forward(layers, batch()))
        gc.callbacks.remove(note)
        assert generations == []
        seen: list[tuple[int, int, int]] = []
        for layer in layers:
            layer.mlp.linear_fc2.weight.register_hook(lambda _: seen.append(gc.get_threshold()))
        loss.backward()
        assert [threshold == OFTEN for threshold in seen] == [False] * 5 + [True], "the last is layer 0's"
        assert gc.get_threshold() == OFTEN


@pytest.mark.parametrize("schedule", [one_after_the_other(3), one_forward_one_backward(4)])
def test_no_delay_outlasts_a_step(schedule: list) -> None:
    layers = stack(4)
    with Engine(layers):
        for _ in range(3):
            train_step(layers, schedule)
            assert gc.get_threshold() == OFTEN


class Cycle:
    """Garbage that holds a tensor."""

    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.empty(10)


def test_garbage_is_bounded_where_a_graph_is_always_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.swap.engine.collector.MANY", 400)
    layers, losses, living, numbers = stack(4), [], [], []
    with Engine(layers):
        for number in range(30):
            losses.append(loss_of(forward(layers, batch(number))))
            living += [weakref.ref(Cycle()) for _ in range(100)]
            numbers.append(sum(reference() is not None for reference in living))
            if number:
                losses.pop(0).backward()
        assert max(numbers) < 1000, numbers
        losses.pop().backward()
        assert gc.get_threshold() == OFTEN


def test_a_step_without_backward_ends_its_delay() -> None:
    layers = stack(4)
    engine, loss = Engine(layers), loss_of(forward(layers, batch()))
    del loss
    assert gc.get_threshold() != OFTEN
    with torch.no_grad():
        forward(layers, batch())
    assert gc.get_threshold() == OFTEN
    forward(layers, batch())
    engine.close()
    assert gc.get_threshold() == OFTEN
