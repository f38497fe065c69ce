"""Layers that run again: what they compute differently is an error, whatever it comes from."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.types import UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.layer_state import StateReader
from megatron.swap.engine.overrides import in_backward
from megatron.swap.engine.recomputed_run import Contexts, RecomputedRunError, RunChecks
from tests.engine import Engine, one_after_the_other, stack, train_step

CONTEXTS = Contexts(nullcontext, lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
FACTOR = [1.0]


def enlarge() -> None:
    FACTOR[0] *= 1.5


def untouched(run: Callable[..., Any], *args: Any) -> Any:
    """Call ``run`` as a boundary does."""
    with CONTEXTS.untouched():
        return run(*args)


class Block(nn.Module):
    """Reads a global and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor, self.shift = nn.Linear(64, 64), 1.0, torch.zeros(64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.linear(hidden).tanh() * FACTOR[0] * self.factor + self.shift).sin() * 2.0


@pytest.fixture(autouse=True)
def factor() -> Iterator[None]:
    FACTOR[0] = 1.0
    yield
    FACTOR[0] = 1.0


class Loop:
    """Steps of one layer in a checkpoint whose runs are checked."""

    def __init__(self, block: nn.Module | None = None, use_reentrant: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.block = block or Block()
        self.device = EmulatedDevice(0.0)
        self.checks = RunChecks(self.device)
        self.reader = StateReader(self.block)
        self.use_reentrant = use_reentrant
        self.options: dict[str, Any] = {"forked": partial(torch.random.fork_rng, []), "contexts": CONTEXTS, **options}

    def step(self, between: Callable[[], object] = lambda: None) -> torch.Tensor:
        run = self.checks.run(0, "layer 0", self.reader.read(), sees_saved=not self.use_reentrant, **self.options)
        hidden = torch.ones(64, 64, requires_grad=True)
        block = partial(untouched, run, self.block) if self.use_reentrant else partial(run, self.block)
        out = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        between()
        out.sum().backward()
        assert hidden.grad is not None
        return hidden.grad


BOTH = {"use_reentrant": True, "may_have_gradients": True, "is_well_known": True}
KINDS = pytest.mark.parametrize("kind", [{}, {"use_reentrant": True}, BOTH], ids=["saved tensors", "results", "both"])


@KINDS
@pytest.mark.parametrize("reads", ["at once", "before_step", "read"])
def test_what_nobody_sees_is_an_error_at_once_at_first_and_before_a_step_or_a_save_later(
    kind: dict[str, bool], reads: str
) -> None:
    loop = Loop(**kind)
    if reads == "at once":
        with pytest.raises(RecomputedRunError, match=r"layer 0 ran again in backward and .*a global"):
            loop.step(enlarge)
        return
    loop.step()
    loop.step(enlarge)
    with pytest.raises(RecomputedRunError, match="layer 0 ran again"):
        getattr(loop.checks, reads)()
    loop.checks.read()  # nothing new


@KINDS
def test_what_was_replaced_is_put_back_and_what_was_changed_in_place_is_refused(kind: dict[str, bool]) -> None:
    loop = Loop(**kind)
    right = loop.step()
    assert torch.equal(loop.step(lambda: setattr(loop.block, "factor", 3.0)), right)
    assert loop.block.factor == 3.0
    with pytest.raises(UsageError, match=r"layer 0 runs again in backward, but shift changed since forward\. .*budget"):
        loop.step(lambda: loop.block.shift.add_(1))


class Noisy(Block):
    """Another result each time, as atomic additions of a GPU give."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.noises, self.size = itertools.count(1), size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * (1 + self.size * next(self.noises))) * torch.ones(64)  # it saves a vector, too


@KINDS
@pytest.mark.parametrize("is_exact", [True, False], ids=["found", "known"])
def test_kernels_that_are_not_deterministic(kind: dict[str, bool], is_exact: bool) -> None:
    loop = Loop(Noisy(1e-6), **kind, is_exact=is_exact)
    loop.checks.may_vary = True
    for _ in range(4):
        loop.step()
        loop.checks.read()
    assert next(loop.block.noises) == 4 * 2 + 1 + 1, "it runs once more than needed, in the first backward alone"  # type: ignore[call-overload]
    (line,) = loop.checks.take_lines()
    assert line.startswith("layer 0: two runs with the same inputs differ, because its kernels are not deterministic")
    loop.block.size = 0.05  # type: ignore[assignment]
    loop.step(lambda: setattr(loop.block, "size", 0.0))  # put back: the same noise, within the tolerance or not
    with pytest.raises(RecomputedRunError):
        loop.checks.read()


@KINDS
@pytest.mark.parametrize(("size", "may_vary"), [(1e-6, False), (0.01, True)], ids=["deterministic", "large"])
def test_noise_is_an_error_where_kernels_are_deterministic_or_it_is_large(
    kind: dict[str, bool], size: float, may_vary: bool
) -> None:
    loop = Loop(Noisy(size), **kind)
    loop.checks.may_vary = may_vary
    with pytest.raises(RecomputedRunError):
        loop.step()


def test_a_result_beside_the_result_is_refused() -> None:
    """A loss that reads an attribute of the layer would lose its gradient."""

    class Aside(Block):
        aside = torch.zeros(())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result = super().forward(hidden)
            if not in_backward():
                self.aside = result.square().mean()
            return result

    loop = Loop(Aside(), **BOTH)
    with pytest.raises(UsageError, match="layer 0 is recomputed whole, and gives autograd more than its result"):
        loop.step(lambda: loop.block.aside.backward())  # type: ignore[operator]


@KINDS
def test_a_result_that_no_saved_tensor_holds(kind: dict[str, bool]) -> None:
    class Scaled(Block):
        """It runs on after the last tensor that it saves, from which a checkpoint needs nothing more."""

        num_runs = itertools.count(1)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * (1 + 0.1 * next(self.num_runs))

    with pytest.raises(RecomputedRunError, match="layer 0 ran again in backward and computed something else"):
        Loop(Scaled(), **kind).step()


@KINDS
def test_a_layer_that_takes_a_gradient_in_its_own_forward(kind: dict[str, bool]) -> None:
    class Sloped(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                leaf = hidden.detach().requires_grad_()
                (slope,) = torch.autograd.grad(super().forward(leaf).square().sum(), leaf)
            return super().forward(hidden) + slope

    loop = Loop(Sloped(), **kind)
    hidden = torch.ones(64, 64, requires_grad=True)
    loop.block(hidden).sum().backward()
    for _ in range(3):
        assert torch.equal(loop.step(), hidden.grad)
        loop.checks.read()
    (known,) = loop.checks._known.values()
    assert known.takes_gradient is (kind == BOTH), "then its own forward has its saved tensors, from the second run on"


def test_a_layer_that_counts_itself_is_put_back_between_its_two_runs() -> None:
    class Counting(Block):
        count, seen = 0, [0]

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.seen = [*self.seen, self.count]
            return super().forward(hidden) * (1 + 0.01 * self.count) * len(self.seen)

    for kind in ({}, {"use_reentrant": True}, BOTH):
        loop = Loop(Counting(), **kind)
        for step in range(1, 4):
            loop.step()
            loop.checks.before_step()
            assert loop.block.count == step
        loop.checks.read()
        assert loop.checks.take_lines() == []


def test_recomputed_storages_take_turns() -> None:
    layers = stack(4)
    with Engine(layers, swapped=(), recompute=("norm", "activation")) as engine:
        checks, seen = engine.saved_tensors.checks, []
        inner = checks.check_in_turn
        checks.check_in_turn = lambda first, storage: (seen.append(first.known.name), inner(first, storage))  # type: ignore[method-assign]
        for _ in range(len(checks._sites) or 12):
            train_step(layers, one_after_the_other(1))
        assert len(set(seen)) > 6
        checks.read()
        spec_of = checks.print_in_turn
        checks.print_in_turn = lambda *given: (made := spec_of(*given)) and made._replace(sums=made.sums + 1)  # type: ignore[method-assign]
        train_step(layers, one_after_the_other(1))
        with pytest.raises(RecomputedRunError, match=r"layers\.\d/.* ran again"):
            checks.read()


class Reads(torch.autograd.Function):
    """Reads a global in forward for its backward alone."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(torch.full_like(hidden, FACTOR[0]).to(dtype))
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.saved_tensors[0], None


class OfBackwardAlone(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(64, 64), dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(Reads.apply(hidden, self.dtype)).sin()


@pytest.mark.parametrize(("kind", "dtype"), [({}, torch.float32), (BOTH, torch.float32), (BOTH, torch.uint8)], ids=str)
def test_what_only_a_backward_reads(kind: dict[str, bool], dtype: torch.dtype) -> None:
    """Saved bytes count where no workspaces are saved."""
    FACTOR[0] = 2.0
    loop = Loop(OfBackwardAlone(dtype), **kind)
    loop.step()
    loop.step(enlarge)
    with pytest.raises(RecomputedRunError, match="layer 0 ran again"):
        loop.checks.read()
