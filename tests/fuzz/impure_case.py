"""Random layers that are no pure functions, in loops with a budget: equal to the plain run to the bit, or an error.

A layer reads a state in one of ``PLACES``. The layer changes it in each forward, or the loop between a forward and its
backward; from the start, or once a plan is chosen. The state changes what autograd saves: all of it, an element, or the
order. An error must come before a wrong state can be saved. What a backward alone reads may take as many steps as there
are layers.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import traceback
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import GIB
from megatron.swap.engine.overrides import override_forward
from megatron.swap.profiling.observer import Observer
from tests.fuzz.records import Record, difference

WIDTH, NUM_ROWS, NUM_LAYERS, NUM_STEPS = 64, 64, 5, 30
GLOBALS: dict[int, int] = {}


class Place:
    """Where a layer has its state, a whole number. ``is_seen``: attributes and the context show it."""

    is_seen = True

    def __init__(self, layer: Impure) -> None:
        self.layer = layer

    def read(self) -> Any:
        return 0

    def change(self) -> object:
        """Add 1 to the state."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward of the model, if the state is one."""
        return contextlib.nullcontext()


class Attribute(Place):
    """An attribute of the layer: ``made`` is its first value, ``get`` reads it, ``add`` changes it."""

    made: Callable[[], Any]
    get: Callable[[Any], Any]
    add: Callable[[Any], object]

    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        layer.state = type(self).made()

    def read(self) -> Any:
        return type(self).get(self.layer.state)

    def change(self) -> object:
        return type(self).add(self.layer.state)


def attribute(
    made: Callable[[], Any], get: Callable[[Any], Any], add: Callable[[Any], object], is_seen: bool = True
) -> type[Place]:
    members = {"made": staticmethod(made), "get": staticmethod(get), "add": staticmethod(add), "is_seen": is_seen}
    return type("OneAttribute", (Attribute,), members)


class Buffer(Place):
    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        layer.register_buffer("count", torch.zeros(()))

    def read(self) -> Any:
        return self.layer.count

    def change(self) -> object:
        return self.layer.count.add_(1)


class Number(Place):
    """Another object after each change."""

    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        layer.number = 1000

    def read(self) -> Any:
        return self.layer.number - 1000

    def change(self) -> None:
        self.layer.number += 1


class OfClass(Place):
    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        layer.__class__ = type("Impure", (Impure,), {"count": 0})

    def read(self) -> Any:
        return type(self.layer).count

    def change(self) -> None:
        type(self.layer).count += 1


class Global(Place):
    is_seen = False

    def read(self) -> Any:
        return GLOBALS.get(id(self.layer), 0)

    def change(self) -> None:
        GLOBALS[id(self.layer)] = self.read() + 1


class Closure(Place):
    is_seen = False

    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        count = 0

        def change() -> None:
            nonlocal count
            count += 1

        self._change, self._read = change, lambda: count

    def read(self) -> Any:
        return self._read()

    def change(self) -> None:
        self._change()


class Drawn(Place):
    """An iterator: reading it changes it."""

    is_seen = False

    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        layer.numbers = itertools.count()
        self._last = 0

    def read(self) -> Any:
        return self._last

    def change(self) -> None:
        self._last = next(self.layer.numbers)


class Generator(Place):
    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        layer.generator = torch.Generator().manual_seed(1)

    def read(self) -> Any:
        state = self.layer.generator.get_state()
        value = torch.rand((), generator=self.layer.generator)
        self.layer.generator.set_state(state)
        return value

    def change(self) -> None:
        torch.rand((), generator=self.layer.generator)


class Hook(Place):
    """A forward hook that is there or not."""

    handle: Any = None

    def change(self) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None
        else:
            self.handle = self.layer.up.register_forward_hook(lambda _, args, out: out * 1.5)


class Patched(Place):
    """A function of this module that is replaced."""

    is_seen = False

    def __init__(self, layer: Impure) -> None:
        super().__init__(layer)
        FUNCTIONS[id(layer)] = lambda: 0

    def read(self) -> Any:
        return FUNCTIONS[id(self.layer)]()

    def change(self) -> None:
        now = self.read() + 1
        FUNCTIONS[id(self.layer)] = lambda: now


FUNCTIONS: dict[int, Callable[[], int]] = {}


class Rate(Place):
    def change(self) -> None:
        self.layer.dropout.p = 0.9 if self.layer.dropout.p < 0.5 else 0.1


class Training(Place):
    def change(self) -> None:
        self.layer.train(not self.layer.training)


class Bias(Place):
    """A weight that no backward reads."""

    def change(self) -> None:
        with torch.no_grad():
            self.layer.up.bias.add_(0.25)


class Switches(Place):
    """A context around the forward of the model."""

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16)


class BackwardAlone(Global):
    """A backward reads it, and no forward does."""


PLACES: dict[str, type[Place]] = {
    "tensor": attribute(lambda: torch.zeros(()), lambda t: t, lambda t: t.add_(1)),
    "data": attribute(lambda: torch.zeros(()), lambda t: t, lambda t: t.data.add_(1), False),
    "array": attribute(lambda: np.zeros(1), lambda a: float(a[0]), lambda a: a.__iadd__(1)),
    "list": attribute(lambda: [0], lambda x: x[0], lambda x: x.__setitem__(0, x[0] + 1)),
    "dict": attribute(lambda: {"n": 0}, lambda x: x["n"], lambda x: x.update(n=x["n"] + 1)),
    "nested": attribute(
        lambda: ({"a": [{"n": 0}]},), lambda x: x[0]["a"][0]["n"],
        lambda x: x[0]["a"][0].update(n=x[0]["a"][0]["n"] + 1),
    ),
    "deque": attribute(lambda: deque([0]), lambda x: x[-1], lambda x: x.append(x[-1] + 1)),
    "set": attribute(set, len, lambda x: x.add(len(x))),
    "object": attribute(lambda: Holder(), lambda x: x.count, lambda x: setattr(x, "count", x.count + 1)),
    "namespace": attribute(
        lambda: Holder(SimpleNamespace(n=0)), lambda x: x.count.n, lambda x: setattr(x.count, "n", x.count.n + 1)
    ),
    "slots": attribute(lambda: Slotted(), lambda x: x.count, lambda x: setattr(x, "count", x.count + 1)),
    "user's dict": attribute(lambda: UserDict(n=0), lambda x: x["n"], lambda x: x.update(n=x["n"] + 1)),
    "buffer": Buffer, "counter": Number, "class": OfClass, "generator": Generator,
    "global": Global, "closure": Closure, "iterator": Drawn, "patched": Patched, "backward alone": BackwardAlone,
    "hook": Hook, "rate": Rate, "training": Training, "bias": Bias, "switches": Switches,
}  # fmt: skip
BY_THE_LOOP = {"hook", "rate", "training", "bias", "switches"}
"""What no layer changes itself."""


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Holder:
    def __init__(self, count: Any = 0) -> None:
        self.count = count


def scaled(hidden: torch.Tensor, state: Any) -> torch.Tensor:
    return hidden * (1 + 0.3 * (state % 5))


def one_element(hidden: torch.Tensor, state: Any) -> torch.Tensor:
    added = torch.zeros_like(hidden)
    added[-1, -1] = float(state)
    return hidden + added


def exchanged(hidden: torch.Tensor, state: Any) -> torch.Tensor:
    """The same elements in another order."""
    return hidden.roll(int(state) % 7, 0)


EFFECTS = {function.__name__: function for function in (scaled, one_element, exchanged)}


class ReadInBackward(torch.autograd.Function):
    """Identity. Its gradient has a factor that forward saves and reads, and that changes nothing else."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return hidden + 0 * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[0], None


class Impure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.dropout(self.up(hidden))
        if (case := CASES.get(id(self))) is not None:
            inner = case.impure(inner)
        return hidden + self.down(inner.tanh())


CASES: dict[int, Run] = {}
"""By the addresses of layers: what a layer does must not be an attribute of it."""


class Run:
    """The state of one layer in one training run."""

    def __init__(self, case: Case, layer: Impure) -> None:
        self.case, self.place = case, PLACES[case.place](layer)
        self.step = 0
        CASES[id(layer)] = self
        GLOBALS.pop(id(layer), None)

    def is_due(self) -> bool:
        return self.step >= self.case.first_step

    def impure(self, inner: torch.Tensor) -> torch.Tensor:
        if self.case.by_layer and self.is_due():
            self.place.change()
        state = self.place.read()
        if isinstance(self.place, BackwardAlone):
            # Made by an operator of the layer, so that a checkpoint makes it again.
            return ReadInBackward.apply(inner, inner.new_full((), 1.0 + state % 5))
        return EFFECTS[self.case.effect](inner, state)


class Case:
    def __init__(self, seed: int) -> None:
        choose = random.Random(f"impure {seed}")
        self.seed = seed
        self.place = choose.choice(list(PLACES))
        self.by_layer = self.place not in BY_THE_LOOP and choose.random() < 0.5
        self.first_step = choose.choice([0, 0, 0, 9, 15, 21, 25])
        self.layers = sorted(choose.sample(range(NUM_LAYERS), choose.choice([1, 1, 2, NUM_LAYERS])))
        self.effect = choose.choice(list(EFFECTS))
        self.num_micro = choose.choice([1, 1, 1, 2])
        self.saves_every = choose.choice([1, 1, 3, 10])
        self.fraction = choose.choice([0.25, 0.35, 0.5])
        self.reads_loss = choose.random() < 0.5

    @property
    def must_be_equal(self) -> bool:
        """Whether nothing is refused: a layer that changes what is seen from the start on never runs again."""
        return PLACES[self.place].is_seen and self.by_layer and self.first_step == 0

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        return nn.Sequential(*(Impure() for _ in range(NUM_LAYERS)))

    def train(self, model: nn.Sequential, record: Record) -> None:
        """Train, and note each state that is saved."""
        runs = [Run(self, model[number]) for number in self.layers]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(self.seed + 1)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            for micro in range(self.num_micro):
                for run in runs:
                    run.step = step
                batch = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
                with runs[0].place.around() if runs[0].is_due() else contextlib.nullcontext():
                    loss = model(batch).float().square().mean()
                for run in runs:
                    if not self.by_layer and run.is_due():
                        run.place.change()
                loss.backward()
                for run in runs:
                    if not self.by_layer and run.is_due() and self.place in BY_THE_LOOP:
                        run.place.change()
                if self.reads_loss:
                    loss.item()
            optimizer.step()
            if step % self.saves_every == self.saves_every - 1 or step == NUM_STEPS - 1:
                record.note(f"step {step}", model.state_dict())


def run_seed(seed: int) -> dict[str, Any]:
    """Return the row of a case."""
    case = Case(seed)
    row: dict[str, Any] = {"case": vars(case), "features": [case.place, case.effect], "figures": {}}
    model, expected, found, observer = case.model(), Record(), Record(), Observer()
    twin = copy.deepcopy(model)
    override_forward(twin, _observed(twin, observer))
    try:
        case.train(twin, expected)
    except Exception as error:
        return row | {"outcome": "skipped", "error": f"{type(error).__name__}: {error}"}
    text = ""
    try:
        for budget_gib in _budgets(case.fraction * observer.peak_bytes / GIB, row):
            model, found = case.model(), Record()
            with (
                _rising(row),
                swap.activations(model, memory_gib=budget_gib, min_mib=0, host_gib=0.1, log=lambda _: None) as swapped,
            ):
                case.train(model, found)
                row["figures"] = {"reloaded_bytes": swapped.stats().in_bytes, "plans": "recompute" in swapped.plan()}
    except (swap.SwapError, RuntimeError) as error:  # in words, by this package, or as plain PyTorch does
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, swap.SwapError) and "in place" not in text:
            return row | {"outcome": "failed", "error": text, "trace": traceback.format_exc()}
    except Exception as error:
        return row | {"outcome": "failed", "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    return row | judged(case, expected, found, text)


def judged(case: Case, expected: Record, found: Record, error: str) -> dict[str, Any]:
    """Return the outcome. After an error the states that were saved before it are compared."""
    if not error:
        line = difference(expected, found)
        return {"outcome": "equal"} if line is None else {"outcome": "different", "error": f"silently: {line}"}
    saved = Record()
    saved.leaves = {name: expected.leaves[name] for name in found.leaves}
    line = difference(saved, found)
    if case.must_be_equal:
        return {"outcome": "different", "error": f"refused, where nothing should be: {error}"}
    if line is None:
        return {"outcome": "refused", "error": error}
    # Saved states are named by their steps. All steps from the first wrong one to the last saved count.
    steps = [int(name.split()[1]) for name in found.leaves]
    first = int(line.split()[1])
    if case.place == "backward alone" and steps[-1] - first < NUM_LAYERS:
        return {"outcome": "refused", "error": f"in time: {error}"}
    return {"outcome": "different", "error": f"saved before the error: {line}; then {error}"}


def _budgets(first_gib: float, row: dict[str, Any]) -> Iterator[float]:
    """Yield budgets until one is feasible."""
    yield first_gib
    for _ in range(4):
        if (smallest_gib := row.pop("smallest_gib", None)) is None:
            return
        yield 1.05 * smallest_gib


@contextlib.contextmanager
def _rising(row: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Infeasible as error:
        row["smallest_gib"] = error.smallest_gib


def _observed(model: nn.Module, observer: Observer) -> Callable[..., Any]:
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with observer.context(model):
            return inner(*args, **kwargs)

    return forward
