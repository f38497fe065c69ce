"""Recomputing single sites: bit-equal to keeping them, in any mix with swapping, whatever happens to the tensors."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.swap.common.types import ACTIVATION, LINEAR, NORM, PRODUCERS, Action, Site
from megatron.swap.profiling.observer import Observer
from tests.engine import (
    HIDDEN,
    TOKENS,
    Engine,
    Result,
    batch,
    forward,
    loss_of,
    one_after_the_other,
    result,
    stack,
    train_step,
)
from tests.lazy_device import LazyDevice, LazyStream
from tests.recipe_cases import Block, Choice, blocks, chain, compare, doubling, one_step
from tests.sizes import sized

HIDDEN_BYTES = TOKENS * HIDDEN * 4


# ------------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("swapped", [[], [1, 2]], ids=["none", "middle"])
@pytest.mark.parametrize("kinds", [[NORM], [ACTIVATION], [LINEAR], PRODUCERS], ids=["norm", "act", "linear", "all"])
def test_equal_to_the_bit(swapped: list[int], kinds: list[str]):
    engine = compare(stack(), one_step, swapped=swapped, recompute=kinds)
    sites = 4 * (2 * (NORM in kinds) + (ACTIVATION in kinds) + 2 * (LINEAR in kinds))
    assert engine.counters.num_recomputed == sites * 2 * 2  # two micro-batches, two steps
    if kinds == [NORM]:
        assert [engine.counters.layers[layer].recomputed_bytes for layer in range(4)] == [2 * HIDDEN_BYTES * 4] * 4
    assert engine.recomputer.refused == {}
    assert bool(engine.counters.out_bytes) == bool(swapped)


@settings(max_examples=sized(20, 5, 40), deadline=None)
@given(
    choices=st.lists(st.sampled_from(Action), min_size=37, max_size=37),
    window=st.sampled_from([None, 0, 1 << 16]),
    verify=st.booleans(),
)
def test_any_mix_of_the_three_actions(choices: list[Action], window: int | None, verify: bool):
    """Every site has its own action. Sites that cannot be recomputed are swapped instead."""
    policy = Choice(lambda site, _: choices[sum(map(ord, str(site))) * 31 % 37])
    compare(stack(), one_step, policy=policy, window_bytes=window, verify=verify)


# -------------------------------------------------------------------------------------------------------- memory


def peak_bytes(**options: object) -> int:
    observer, layers = Observer(), stack()
    with Engine(layers, observer=observer, window_bytes=0, commit_bytes=1 << 14, **options):
        train_step(layers, one_after_the_other(1))
    return observer.peak_bytes


def test_the_peak_falls_by_what_is_not_held() -> None:
    plain = peak_bytes(swapped=[])
    # At the peak the frames of the last layer still hold one of its norms' outputs, and that of its activation.
    assert plain - peak_bytes(swapped=[], recompute=[NORM]) == (4 * 2 - 1) * HIDDEN_BYTES
    assert plain - peak_bytes(swapped=[], recompute=[ACTIVATION]) == (4 - 1) * 4 * HIDDEN_BYTES
    assert plain - peak_bytes(swapped=[], recompute=[LINEAR]) >= (4 - 1) * (3 + 4) * HIDDEN_BYTES
    assert peak_bytes(recompute=PRODUCERS) < peak_bytes() < plain


@contextmanager
def no_collector() -> Iterator[None]:
    """Disable the garbage collector, since device memory must not wait for it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


held: list[weakref.ref] = []


def noted(tensor: torch.Tensor) -> torch.Tensor:
    held.append(weakref.ref(tensor.untyped_storage()))
    return tensor


def saves_its_norm(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    norm = noted(block.norm(hidden))
    noted(block.norm(hidden * 2))  # its input and itself: saved by nobody but the norm's own graph
    return block.linear(norm) + block.other(block.activation(norm))


def breaks_off(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    if block.step > 1:
        return chain(block, hidden)
    doubled = noted(hidden * 2)
    with torch.no_grad():
        block.norm(doubled)
    norm = block.norm(doubled)
    del doubled
    raise InterruptedError(norm.shape)


@pytest.mark.parametrize("body", [saves_its_norm, breaks_off])
def test_nothing_is_held_after_the_layer_or_its_exception(body: Callable) -> None:
    held.clear()
    layers = doubling(body)
    plain = copy.deepcopy(layers)
    with no_collector(), Engine(layers, swapped=[], recompute=PRODUCERS) as engine:
        try:
            loss = loss_of(forward(layers, batch()))
        except InterruptedError as error:
            error.__traceback__ = None
        assert {reference() for reference in held} == {None}
        if body is breaks_off:
            for layer in (*layers, *plain):
                layer.step = 1
            assert one_step(layers).same_as(one_step(plain))
            assert engine.counters.num_recomputed == 3 * 2 * 2
        else:
            loss.backward()


# ----------------------------------------------------------------------------------------- what stands in the graph


@pytest.mark.parametrize("first", Action)
@pytest.mark.parametrize("second", Action)
def test_what_a_recipe_needs_is_itself_kept_swapped_or_recomputed(first: Action, second: Action):
    """The activation's output is made from the norm's output, and that from the layer's input."""

    def choose(site: Site, producer: str | None) -> Action:
        if site.path == "linear":
            return Action.RECOMPUTE
        return first if site.path == "norm" else second

    engine = compare(blocks(chain), one_step, policy=Choice(choose))
    recomputed_each = 1 + (second is Action.RECOMPUTE)
    assert engine.counters.num_recomputed == recomputed_each * 3 * 2 * 2
    assert bool(engine.counters.out_bytes) == (Action.SWAP in (first, second) or first is Action.RECOMPUTE)


def test_a_retained_graph_goes_backward_twice() -> None:
    def run(layers: nn.ModuleList) -> Result:
        layers.zero_grad()
        loss = loss_of(forward(layers, batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        return result(layers, loss)

    assert compare(stack(), run, 1, recompute=PRODUCERS).counters.num_recomputed == 2 * 20


def test_another_stream_makes_its_own_and_what_was_made_again_goes_with_its_last_user() -> None:
    layers, device, unpack = stack(1), LazyDevice(), lambda packed: packed.tensor
    with Engine(layers, recompute=[NORM], device=device, swapped=[]) as engine:
        loss = loss_of(forward(layers, batch()))
        recipe = next(data.spec for data in saved_by(loss.grad_fn) if hasattr(data, "spec"))
        recipe.num_packed = 3  # as if three consumers had saved it
        first = engine.recomputer.recompute(recipe, unpack)
        device.compute = LazyStream("side", eager=True)
        second = engine.recomputer.recompute(recipe, unpack)
        third = engine.recomputer.recompute(recipe, unpack)
        assert first._cdata != second._cdata == third._cdata
        assert recipe.storage is None


def saved_by(node: Any) -> Iterator[Any]:
    """Yield what stands for saved tensors in a graph."""
    for name in dir(node):
        if name.startswith("_raw_saved"):
            yield getattr(getattr(node, name), "data", None)
    for function, _ in node.next_functions if node is not None else ():
        yield from saved_by(function)
