"""Random layers that are no pure functions, in loops with a budget: equal to the plain run to the bit, or an error.

A layer reads a state in one of ``PLACES``. The layer changes it in each forward, or the loop between a forward and its
backward; from the start, or once a plan is chosen. The state changes what autograd saves: all of it, an element, or the
order. An error must come before a wrong state can be saved. What a backward alone reads may take as many steps as there
are layers.
"""

from __future__ import annotations

import contextlib
import copy
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
GLOBALS: Counter[int] = Counter()
HOOKS: dict[int, Any] = {}
"""By the addresses of layers, like ``GLOBALS``: what no attribute shows."""


class Holder:
    def __init__(self) -> None:
        self.count = 0


def peeked(generator: torch.Generator) -> torch.Tensor:
    """Return what the generator would draw next."""
    state = generator.get_state()
    value = torch.rand((), generator=generator)
    generator.set_state(state)
    return value


def add_one(items: Any, key: Any) -> None:
    items[key] += 1


def toggle_hook(layer: Impure) -> None:
    """Add a forward hook, or remove it."""
    if (handle := HOOKS.pop(id(layer), None)) is not None:
        handle.remove()
    else:
        HOOKS[id(layer)] = layer.up.register_forward_hook(lambda _, args, out: out * 1.5)


class Place(NamedTuple):
    """Where a layer has its state, a whole number, and how it changes there.

    Attributes:
        made: the first value of the attribute ``state``.
        read: reads it.
        change: adds 1 to it.
    """

    made: Callable[[], Any] = lambda: None
    read: Callable[[Impure], Any] = lambda layer: 0
    change: Callable[[Impure], object] = lambda layer: None


GLOBAL = Place(read=lambda layer: GLOBALS[id(layer)], change=lambda layer: add_one(GLOBALS, id(layer)))
PLACES: dict[str, Place] = {
    "tensor": Place(lambda: torch.zeros(()), lambda layer: layer.state, lambda layer: layer.state.add_(1)),
    "buffer": Place(lambda: nn.Buffer(torch.zeros(())), lambda layer: layer.state, lambda layer: layer.state.add_(1)),
    "array": Place(lambda: np.zeros(1), lambda layer: float(layer.state[0]), lambda layer: add_one(layer.state, 0)),
    "nested": Place(
        lambda: ({"a": [0]},), lambda layer: layer.state[0]["a"][0], lambda layer: add_one(layer.state[0]["a"], 0)
    ),
    "object": Place(Holder, lambda layer: layer.state.count, lambda layer: add_one(vars(layer.state), "count")),
    "counter": Place(
        lambda: 1000, lambda layer: layer.state - 1000, lambda layer: setattr(layer, "state", layer.state + 1)
    ),
    "generator": Place(
        lambda: torch.Generator().manual_seed(1), lambda layer: peeked(layer.state),
        lambda layer: torch.rand((), generator=layer.state),
    ),
    "global": GLOBAL,
    "backward alone": GLOBAL,
    "hook": Place(change=toggle_hook),
    "rate": Place(change=lambda layer: setattr(layer.dropout, "p", 0.9 if layer.dropout.p < 0.5 else 0.1)),
    "bias": Place(change=lambda layer: layer.up.bias.detach().add_(0.25)),
    "switches": Place(),
}  # fmt: skip
UNSEEN = {"global", "backward alone"}
"""What neither attributes nor the context show. A backward alone reads the second, and no forward does."""
BY_THE_LOOP = {"hook", "rate", "bias", "switches"}
"""What no layer changes itself. No backward reads a bias; the context around the forward of the model switches."""


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
        self.case, self.layer, self.place = case, layer, PLACES[case.place]
        self.step = 0
        layer.state = self.place.made()
        CASES[id(layer)] = self
        for found in (GLOBALS, HOOKS):
            found.pop(id(layer), None)

    def is_due(self) -> bool:
        return self.step >= self.case.first_step

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for the forward of the model."""
        switches = self.case.place == "switches" and self.is_due()
        return torch.autocast("cpu", torch.bfloat16) if switches else contextlib.nullcontext()

    def change(self) -> None:
        self.place.change(self.layer)

    def impure(self, inner: torch.Tensor) -> torch.Tensor:
        if self.case.by_layer and self.is_due():
            self.change()
        state = self.place.read(self.layer)
        if self.case.place == "backward alone":
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
        return self.place not in UNSEEN and self.by_layer and self.first_step == 0

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
                with runs[0].around():
                    loss = model(batch).float().square().mean()
                for run in runs:
                    if not self.by_layer and run.is_due():
                        run.change()
                loss.backward()
                for run in runs:
                    if not self.by_layer and run.is_due() and self.place in BY_THE_LOOP:
                        run.change()
                if self.reads_loss:
                    loss.item()
            optimizer.step()
            if step % self.saves_every == self.saves_every - 1 or step == NUM_STEPS - 1:
                record.note(f"step {step}", model.state_dict())


def run_seed(seed: int) -> dict[str, Any]:
    """Return the row of a case."""
    case = Case(seed)
    row: dict[str, Any] = {"case": vars(case), "figures": {}}
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
