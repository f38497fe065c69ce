"""What a layer reads: each change is found and named, and what was replaced is put back."""

from __future__ import annotations

import functools
import random
from collections import Counter, OrderedDict, UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron.swap.engine.layer_state import MAX_ITEMS, StateReader, put_back


class Slotted:
    __slots__ = ("count", "more", "value")

    def __init__(self) -> None:
        self.count, self.more, self.value = 0, 0, [0]


class OwnSet(set[int]):
    def __init__(self, first: int) -> None:
        super().__init__([first])


class OwnList(list[int]):
    def __copy__(self) -> OwnList:
        raise TypeError


class OwnDict(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        raise TypeError


class Layer(nn.Module):
    of_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)
        self.register_buffer("buffer", torch.zeros(2))
        self.tensor, self.array = torch.zeros(2), np.zeros(2)
        self.number, self.text, self.shape = 1000, "a", torch.Size([1000])
        self.items, self.names, self.queue = [1, [2]], {1}, deque([1])
        self.table = {"a": {"b": 1}}
        self.counter, self.ordered = Counter(a=1), OrderedDict(b=1, a=1)
        self.own_set, self.own_list, self.own_dict = OwnSet(1), OwnList([1]), OwnDict(a=1)
        self.frozen = (1, [2])
        self.object, self.slotted = SimpleNamespace(inner=SimpleNamespace(value=1)), Slotted()
        self.python, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator()
        self.empty: dict[str, int] = {}
        self.partial, self.user = functools.partial(print, [1], end=[1]), UserDict(a=1)


IN_PLACE: dict[str, tuple[Callable[[Layer], object], str]] = {
    "a buffer": (lambda layer: layer.buffer.add_(1), "_buffers.buffer"),
    "a weight": (lambda layer: layer.linear.weight.detach().add_(1), "linear._parameters.weight"),
    "a tensor": (lambda layer: layer.tensor.add_(1), "tensor"),
    "an array": (lambda layer: layer.array.__iadd__(1), "array"),
    "Python's numbers": (lambda layer: layer.python.random(), "python"),
    "NumPy's numbers": (lambda layer: layer.numpy.random(), "numpy"),
    "PyTorch's numbers": (lambda layer: torch.rand(1, generator=layer.torch), "torch"),
    "an attribute of the class": (lambda layer: setattr(type(layer), "of_class", type(layer).of_class + 1),
                                  "Layer.of_class"),
}  # fmt: skip
REPLACED: dict[str, tuple[Callable[[Layer], object], str]] = {
    "a number": (lambda layer: setattr(layer, "number", layer.number + 1), "number"),
    "a list": (lambda layer: layer.items.append(3), "items"),
    "a set": (lambda layer: layer.names.add(2), "names"),
    "a queue": (lambda layer: layer.queue.rotate() or layer.queue.append(2), "queue"),
    "a list in a tuple": (lambda layer: layer.frozen[1].append(3), "frozen"),
    "a list in a partial function": (lambda layer: layer.partial.args[0].append(1), "partial"),
    "a list in a keyword": (lambda layer: layer.partial.keywords["end"].append(1), "partial.end"),
    "a list in a slot": (lambda layer: layer.slotted.value.append(1), "slotted.value"),
    "a slot": (lambda layer: setattr(layer.slotted, "count", 1), "slotted.count"),
    "a counter": (lambda layer: layer.counter.update(a=2), "counter.a"),
    "a set of the user": (lambda layer: layer.own_set.add(2), "own_set"),
    "a list of the user": (lambda layer: list.append(layer.own_list, 2), "own_list"),
    "a dictionary that refuses": (lambda layer: dict.__setitem__(layer.own_dict, "a", 2), "own_dict.a"),
    "a tensor": (lambda layer: setattr(layer, "tensor", torch.zeros(2)), "tensor"),
    "a weight": (lambda layer: setattr(layer.linear, "weight", nn.Parameter(torch.ones(4, 4))),
                 "linear._parameters.weight"),
    "a module": (lambda layer: setattr(layer, "dropout", nn.Dropout(0.1)), "_modules.dropout"),
    "the rate of a dropout": (lambda layer: setattr(layer.dropout, "p", 0.5), "dropout.p"),
    "training": (lambda layer: layer.linear.eval(), "linear.training"),
    "a hook": (lambda layer: layer.linear.register_forward_hook(print), "linear._forward_hooks"),
    "a forward": (lambda layer: setattr(layer.linear, "forward", print), "linear.forward"),
    "an attribute anew": (lambda layer: setattr(layer, "more", 1), "more"),
    "an attribute no more": (lambda layer: delattr(layer, "text"), "text"),
    "a value in a dictionary": (lambda layer: layer.table["a"].update(b=2), "table.a.b"),
    "a dictionary that was empty": (lambda layer: layer.empty.update(a=1), "empty"),
    "a value in a dictionary of the user": (lambda layer: layer.user.update(a=2), "user.data.a"),
    "an attribute of an object": (lambda layer: setattr(layer.object.inner, "value", 2), "object.inner.value"),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_PLACE)
def test_a_change_in_place_is_found_and_cannot_be_put_back(what: str) -> None:
    layer, (change, where) = Layer(), IN_PLACE[what]
    state = StateReader(layer).read()
    assert state.changes() == []
    change(layer)
    found = state.changes()
    assert [(one.where, one.old) for one in found] == [(where, None)]
    assert not state.can_be_put_back()


@pytest.mark.parametrize("what", REPLACED)
def test_what_was_replaced_is_found_and_put_back(what: str) -> None:
    layer, (change, where) = Layer(), REPLACED[what]
    before = contents(layer)
    state = StateReader(layer).read()
    change(layer)
    after, found = contents(layer), state.changes()
    assert where in found[0].where
    assert len(found) == 1 or what in ("a hook",)
    assert state.can_be_put_back()
    with put_back(found):
        assert contents(layer) == before
        assert state.changes() == []
    assert contents(layer) == after
    assert contents(layer) != before


def contents(layer: nn.Module) -> list[Any]:
    """Return the dictionaries of modules and objects, with the addresses of their values, and the other containers."""
    owners = [vars(module) for module in layer.modules()]
    owners += [inner for owner in owners for inner in owner.values() if isinstance(inner, dict)]
    if isinstance(layer, Layer):
        owners += [vars(layer.object.inner), layer.table["a"], layer.user.data]
    found: list[Any] = [{key: id(value) for key, value in owner.items()} for owner in owners]
    if isinstance(layer, Layer):
        others = [layer.items, layer.names, layer.queue, layer.frozen, repr(layer.partial), layer.slotted.value]
        others += [layer.slotted.count, getattr(layer.slotted, "more", None), layer.counter, layer.own_set]
        others += [layer.own_list, layer.own_dict]
        others += [layer.ordered, list(reversed(layer.ordered))]
        found.append(repr(others))
    return found


def test_equal_contents_are_no_change() -> None:
    layer = Layer()
    state = StateReader(layer).read()
    layer.number, layer.shape = int("1000"), torch.Size([1000])
    layer.items, layer.table["a"] = [1, [2]], {"b": 1}
    layer.array = np.zeros(2)
    layer.nan = float("nan")
    del layer.nan
    assert state.changes() == []


def test_arguments_are_read_but_no_other_modules_and_no_long_lists() -> None:
    given, layer, other = (SimpleNamespace(offsets=[1]), torch.zeros(1)), Layer(), Layer()
    layer.others, layer.long = [other], [[0] for _ in range(MAX_ITEMS + 1)]
    state = StateReader(layer).read([*given, 3, None])
    other.number += 1
    layer.long[0][0] = 1
    assert state.changes() == []
    layer.long.append([0])
    given[0].offsets.append(2)
    given[1].add_(1)
    assert {change.where for change in state.changes()} == {"long", "an argument.offsets", "an argument"}
