"""Layers that run as before repeat what was decided about their saved tensors. The results are those of deciding."""

import copy
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.swap.common.plan import Plan
from megatron.swap.common.types import Action, Site
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.repeated_run import RepeatingPacker
from megatron.swap.layers import makers
from megatron.swap.operators import repeats as operator_repeats
from tests.plain_loop import loss_of, rows
from tests.planned_loop import QUIET
from tests.unit.native.helpers import NEEDS_COMPILER
from tests.unit.operators.test_records import WIDTH, Dropped, InPlace, Layer, Rotary, Shared, Stack

pytestmark = NEEDS_COMPILER


class Mixed(Policy):
    """Recomputes what it can, and offloads every other tensor beside."""

    def __init__(self, *kept: str) -> None:
        self.kept = kept

    def swaps_layer(self, layer: int) -> bool:
        return True

    def recomputes_layer(self, layer: int) -> bool:
        return True

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        if site.path in self.kept or (producer is None and site.ordinal % 2):
            return Action.KEEP
        return Action.SWAP if producer is None else Action.RECOMPUTE


class AllRecomputed(Mixed):
    """Asks to recompute all, as a plan may: there are refusals."""

    def action(self, site: Site, num_bytes: int, producer: str | None = None) -> Action:
        return Action.KEEP if site.path in self.kept else Action.RECOMPUTE


class Run:
    """A model beside its unswapped copy. ``others``: of the runs that began to repeat, those that did not fit."""

    def __init__(self, layer: Callable[[], nn.Module], policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(7)
        self.plain = Stack(layer)
        self.model = copy.deepcopy(self.plain)
        self.swapped = swap.activations(self.model, memory_gib=1.0, **QUIET)
        self.ended: list[bool] = []
        end = RepeatingPacker.end

        def noted(packer: RepeatingPacker) -> None:
            end(packer)
            self.ended.append(packer.is_other)

        monkeypatch.setattr(RepeatingPacker, "end", noted)
        while self.swapped.stats().stage != "stable":
            self.step()
        self.apply(policy)
        for _ in range(4):  # all operators are recorded, those that are wanted, noted, repeated
            self.step()
        self.ended.clear()

    def apply(self, policy: Policy) -> None:
        target = self.swapped.planned.target
        target.policy._inner, target.policy._keeps_all = policy, False
        plan = self.swapped.auto.plan
        assert isinstance(plan, Plan)
        self.swapped.parts.layers.apply_policy(target.settings.window_bytes(plan))

    def grads(self, model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        loss_of(model(rows(3))).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return grads

    def step(self) -> dict[str, Any]:
        """Run a step; compare with the unswapped one. Return what the engine has done in it."""
        before = self.figures()
        found = self.grads(self.model)
        self.swapped.step()
        expected = self.grads(self.plain)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
        after = self.figures()
        peak = self.swapped.stats().peak_gib
        return {name: after[name] - before[name] for name in after} | {"peak": peak}

    def figures(self) -> dict[str, int]:
        saved_tensors = self.swapped.parts.engine.saved_tensors
        counters = saved_tensors.manager.counters
        assert saved_tensors.recomputer is not None
        return {
            "out": counters.out_bytes, "recomputed": counters.num_recomputed, "refused": counters.num_not_recomputed,
            "recomputed bytes": sum(layer.recomputed_bytes for layer in counters.layers.values()),
            "stayed bytes": sum(layer.stayed_bytes for layer in counters.layers.values()),
            "spared": sum(saved_tensors.recomputer.spared_bytes.values()),
        }  # fmt: skip

    def repeats(self) -> bool:
        """Whether all layers have repeated an earlier run since the last call."""
        ended, self.ended = self.ended, []
        return len(ended) == len(self.model.layers) and not any(ended)


def set_all(run: Run, name: str, value: object) -> None:
    for model in (run.plain, run.model):
        for layer in model.layers:
            setattr(layer, name, value)


@pytest.mark.parametrize(
    ("layer", "policy"),
    [(Layer, Mixed), (Dropped, AllRecomputed),
     *(pytest.param(layer, Mixed, marks=pytest.mark.slow) for layer in (Rotary, Dropped, InPlace, Shared))],
)  # fmt: skip
def test_equal_to_deciding(
    layer: Callable[[], nn.Module], policy: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(layer, policy(), monkeypatch)
    repeated = run.step()
    assert run.repeats()
    assert repeated["recomputed"]
    assert repeated["out"]
    assert repeated["refused"] or policy is Mixed, "a mask cannot be made again"
    monkeypatch.setattr(operator_repeats, "MAX_OTHERS", 0)
    for boundary in run.swapped.parts.layers.boundaries:
        boundary.makers._repeats.clear()
    decided = run.step()
    assert not run.ended
    assert repeated == decided
    run.swapped.close()


class Switched(Layer):
    """What it does depends on ``way``."""

    way = ""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = super().norm(hidden)
        one, other = torch.sin(normed), torch.cos(normed)
        first, second = (other, one) if self.way == "another tensor" else (one, other)
        if self.way == "another operator":
            first = torch.tanh(first)
        result = F.silu(first) * torch.sigmoid(second) + F.silu(one) + F.silu(other)
        changed, base = (second, first) if self.way == "another is changed" else (first, second)
        scaled = changed.detach() + 0.0 if self.way != "changes in place" else changed.detach().clone()
        return result + base.exp() * scaled.mul_(0.5)


class Written(Layer):
    """The same operators write to one tensor or to another, before or after it is saved."""

    way = ""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        other = torch.ones_like(hidden)
        # It saves its output, twice as large as its input, about which nothing is decided yet.
        last = torch.tanh(hidden.expand(2, *hidden.shape))
        (hidden.detach() if self.way == "input" else other).mul_(0.5)
        last = last.sum(0)
        made, twice = torch.sin(last), torch.cos(last)
        F.silu(twice)  # without a backward
        (made if self.way == "output" else other).mul_(0.5)
        (twice if self.way == "saved output" else other).mul_(0.5)
        return super().norm(F.silu(made) + F.silu(twice) + other)


class Saving(Layer):
    """Whether a product saves its input depends on ``way``, and no operator does."""

    way = ""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = super().norm(hidden)
        factor = self.scale.detach().requires_grad_(self.way == "another save")
        return torch.sin(normed * factor) + torch.tanh(normed)


class Reading(nn.Module):
    """The operator of one output reads what nobody saves, and what changes later unseen, or what is saved."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        saved = torch.tanh(hidden)
        unsaved = self.first(saved)
        made = torch.sigmoid(unsaved if self.way == "another input" else saved)
        wide = torch.tanh(made.expand(2, *made.shape)).sum(0)
        unsaved.data.mul_(0.7)
        return self.last(wide) + unsaved * 0.1 + hidden


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "way", "policy"), [
    (Reading, "another input", Mixed), (Switched, "another tensor", Mixed), (Switched, "another tensor", AllRecomputed),
    (Switched, "another operator", Mixed), (Switched, "another is changed", Mixed),
    (Switched, "changes in place", Mixed), (Saving, "another save", Mixed), (Written, "input", Mixed),
    (Written, "output", Mixed), (Written, "saved output", AllRecomputed),
])  # fmt: skip
def test_a_run_that_does_not_fit(
    layer: Callable[[], nn.Module], way: str, policy: Callable[[], Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It decides from there on, and later runs repeat each other again."""
    run = Run(layer, policy(), monkeypatch)
    for _ in range(3):
        run.ended.clear()
        run.step()
    assert run.repeats()
    set_all(run, "way", way)
    run.step()
    set_all(run, "way", "")
    for _ in range(4):
        run.step()
    run.ended.clear()
    run.step()
    assert run.repeats()
    run.swapped.close()


class Changing(Layer):
    """Saves its output, which its caller may change."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(hidden))


def test_changes_in_place_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without swapping."""
    run = Run(Changing, Mixed(), monkeypatch)
    inner = run.model.layers[1].forward
    for model in (run.plain, run.model):
        inner = model.layers[1].forward
        monkeypatch.setattr(model.layers[1], "forward", lambda hidden, inner=inner: inner(hidden).mul_(0.5))
    for model in (run.plain, run.model):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(model(rows(3))).backward()
    assert run.repeats()
    run.swapped.close()


def test_another_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it keeps is kept from its first step on."""
    run = Run(Layer, Mixed(), monkeypatch)
    before = run.step()
    run.ended.clear()
    run.apply(Mixed("gate", "down"))
    after = run.step()
    assert not run.ended
    assert after["recomputed"] < before["recomputed"]
    for _ in range(3):
        run.step()
    run.ended.clear()
    repeated = run.step()
    assert run.repeats()
    assert repeated["recomputed"] == after["recomputed"]
    run.swapped.close()


def test_memory_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that saves more than expected is decided anew: what is kept otherwise is offloaded."""
    run = Run(Layer, Mixed("layer", "up"), monkeypatch)
    before = run.step()
    assert run.repeats()
    run.swapped.planned.target.policy.is_short = True
    after = run.step()
    assert not run.ended
    assert after["out"] > before["out"]
    run.swapped.close()


def test_nothing_of_a_run_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a layer, the graph alone holds what it has saved; also behind one that fails."""
    run = Run(Layer, Mixed(), monkeypatch)
    packers: list[weakref.ref[RepeatingPacker]] = []
    init = RepeatingPacker.__init__

    def noted(packer: RepeatingPacker, *given: Any) -> None:
        packers.append(weakref.ref(packer))
        init(packer, *given)

    monkeypatch.setattr(RepeatingPacker, "__init__", noted)
    run.step()
    monkeypatch.setattr(run.model.layers[2].down, "forward", lambda _: 1 / 0)
    with suppress(ZeroDivisionError):  # not pytest's way, which holds the traceback
        run.model(rows(3))
    assert len(packers) == 7
    assert not any(packer() for packer in packers)
    run.swapped.close()


class Halves(TorchDispatchMode):
    """Changes what an operator returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.silu.default else result


@pytest.mark.slow
def test_a_mode_that_comes_later_is_not_left_out_of_what_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is active in forward alone, so that the operators whose results it changes must not run again."""
    run = Run(Layer, AllRecomputed(), monkeypatch)
    assert run.step()["recomputed"] > 0
    for model in (run.model, run.plain):
        forward = model.forward

        def with_mode(*given: Any, inner: Callable[..., Any] = forward) -> Any:
            with Halves():
                return inner(*given)

        monkeypatch.setattr(model, "forward", with_mode)
    did = [run.step() for _ in range(4)]
    assert did[-1]["recomputed"] > 0


class Moded(Layer):
    """It enters a mode of its own."""

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        with Halves():
            return F.silu(super().norm(hidden))


def test_nothing_is_made_again_in_layers_whose_operators_are_not_all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(Moded, Mixed(), monkeypatch)
    monkeypatch.setattr(makers, "OperatorWatch", lambda *_: pytest.fail("follows"))
    did = run.step()
    assert did["out"] > 0
    assert did["recomputed"] == did["recomputed bytes"] == 0
