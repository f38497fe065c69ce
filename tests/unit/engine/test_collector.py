"""Garbage collections are put off as long as there is a graph, and no longer; garbage stays bounded."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron.swap.layers import boundary
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
def _often() -> Iterator[None]:
    """Make collections frequent."""
    before = gc.get_threshold()
    gc.set_threshold(*OFTEN)
    yield
    gc.set_threshold(*before)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list to which each collection adds its generation."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)


@pytest.mark.parametrize("delays", [True, False])
def test_nothing_is_collected_between_forward_and_backward(delays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not delays:
        monkeypatch.setattr("megatron.swap.engine.manager.begin_delay", lambda: None)
    layers = stack(6)
    with Engine(layers):
        train_step(layers, one_after_the_other(2))
        hidden = batch()
        with counted() as generations:
            loss = loss_of(forward(layers, hidden))
        assert bool(generations) is not delays
        seen: list[tuple[int, int, int]] = []
        for layer in layers:
            layer.mlp.linear_fc2.weight.register_hook(lambda _: seen.append(gc.get_threshold()))
        loss.backward()
        assert [threshold == OFTEN for threshold in seen] == [not delays] * 5 + [True]  # the last is layer 0's
        assert gc.get_threshold() == OFTEN


@pytest.mark.parametrize("schedule", [one_after_the_other(3), one_forward_one_backward(4)])
def test_no_delay_outlasts_a_step(schedule: list[tuple[str, int]]) -> None:
    layers = stack(4)
    with Engine(layers):
        for _ in range(3):
            train_step(layers, schedule)
            assert gc.get_threshold() == OFTEN


def test_no_delay_outlasts_a_step_whose_layers_have_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that return no tensor: backward is noticed at the first tensor that it unpacks."""
    monkeypatch.setattr(boundary, "mark", lambda result, *_, **__: result)
    layers = stack(4)
    with Engine(layers):
        for _ in range(3):
            train_step(layers, one_after_the_other(2))
            assert gc.get_threshold() == OFTEN


@pytest.mark.parametrize("chosen", [(0, 10, 10), (500_000, 10, 10)])
def test_a_collector_that_is_off_or_rare_is_left_alone(chosen: tuple[int, int, int]) -> None:
    gc.set_threshold(*chosen)
    layers = stack(4)
    with Engine(layers):
        loss = loss_of(forward(layers, batch()))
        assert gc.get_threshold() == chosen
        loss.backward()
    assert gc.get_threshold() == chosen


def test_a_run_that_ends_amid_a_step_ends_the_delay() -> None:
    layers = stack(4)
    engine = Engine(layers)
    loss = loss_of(forward(layers, batch()))
    assert gc.get_threshold() != OFTEN
    engine.close()
    assert gc.get_threshold() == OFTEN
    del loss


@pytest.mark.parametrize("is_collected", [True, False])
def test_an_engine_that_is_dropped_amid_a_step_ends_the_delay(is_collected: bool) -> None:
    """When it is collected, or by what the next one does."""
    layers, others = stack(4), stack(4)
    engine = Engine(layers)
    forward(layers, batch())
    assert gc.get_threshold() != OFTEN
    del layers, engine
    if is_collected:
        gc.collect()
    else:
        with Engine(others):
            train_step(others, one_after_the_other(1))
    assert gc.get_threshold() == OFTEN


def test_an_evaluation_behind_a_dropped_graph_ends_the_delay() -> None:
    layers = stack(4)
    with Engine(layers):
        forward(layers, batch())
        with torch.no_grad():
            forward(layers, batch())
        assert gc.get_threshold() == OFTEN


@pytest.mark.parametrize("chosen", [(0, 10, 10), (300, 10, 10)])
def test_a_threshold_that_is_set_meanwhile_stays(chosen: tuple[int, int, int]) -> None:
    layers = stack(4)
    with Engine(layers):
        loss = loss_of(forward(layers, batch()))
        gc.set_threshold(*chosen)
        loss.backward()
    assert gc.get_threshold() == chosen


def test_a_forked_child_has_no_delay() -> None:
    layers = stack(4)
    with Engine(layers):
        loss = loss_of(forward(layers, batch()))
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.get_threshold() == OFTEN else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert gc.get_threshold() != OFTEN
        loss.backward()


class Cycle:
    """Garbage that holds a tensor."""

    def __init__(self) -> None:
        self.itself = self
        self.tensor = torch.empty(10)


def test_garbage_of_discarded_graphs_is_collected() -> None:
    """Graphs are dropped, as in an evaluation without no_grad, so that no backward ends a delay."""
    layers = stack(4)
    living = []
    with Engine(layers):
        for number in range(20):
            living.append(weakref.ref(Cycle()))
            forward(layers, batch(number))
        assert sum(reference() is not None for reference in living) <= 2


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
