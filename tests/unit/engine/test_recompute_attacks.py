"""Models that change, free or alias tensors: recomputing is equal to the bit, refused, or raises plain autograd's
error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron.swap.common.types import ACTIVATION, PRODUCERS, Action, Site, SwapError
from megatron.swap.engine.checksum import VerifyError
from tests.engine import HIDDEN, Engine, Result, batch, forward, loss_of
from tests.recipe_cases import (
    Block,
    Choice,
    blocks,
    chain,
    compare,
    doubling,
    input_changed_after_saving,
    input_changed_later,
    one_step,
    output_changed_after_saving,
    output_changed_later,
    where_known,
)

IN_PLACE = r"modified (by an inplace|in place)"


def test_an_input_changed_before_the_output_is_saved_is_no_input():
    engine = compare(doubling(input_changed_later), one_step, 1, policy=where_known(Action.SWAP))
    assert engine.counters.num_recomputed == 3, "only the first micro-batch's"
    assert "one of its inputs was changed in place" in engine.recomputer.refused.values()


def test_an_output_changed_before_it_is_saved_is_none():
    engine = compare(doubling(output_changed_later), one_step, 1, policy=where_known(Action.SWAP))
    assert engine.counters.num_recomputed == 3
    assert "it was changed in place after it was computed" in engine.recomputer.refused.values()


def test_an_output_changed_behind_autograds_back_is_not_the_same_to_the_bit():
    def body(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        output = block.norm(hidden)
        output.data.mul_(2)
        return block.linear(output)

    engine = compare(blocks(body), one_step, policy=where_known(Action.SWAP))
    assert engine.counters.num_recomputed == 0
    assert set(engine.recomputer.refused.values()) == {"its recomputation gave different bits"}


@pytest.mark.parametrize("engine_on", [False, True])
@pytest.mark.parametrize("body", [input_changed_after_saving, output_changed_after_saving])
def test_a_change_after_saving_is_the_error_that_it_is_without_us(
    body: Callable[[Block, torch.Tensor], torch.Tensor], engine_on: bool
):
    layers = blocks(body)
    with Engine(layers if engine_on else [], recompute=PRODUCERS):
        loss = loss_of(forward(layers, batch()))
        with pytest.raises(RuntimeError, match=IN_PLACE):
            loss.backward()


def test_a_change_after_a_save_that_backward_does_not_use_is_no_error():
    def body(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        norm = block.norm(hidden)
        not_used = norm.sin()
        norm.add_(1)
        result = block.linear(norm)
        del not_used
        return result

    engine = compare(blocks(body), one_step, policy=where_known(Action.SWAP))
    assert engine.recomputer.spared_bytes["norm"] > 0, "the first save was to be recomputed"


def test_a_kernel_that_is_not_deterministic_is_refused_and_not_tried_again():
    calls: list[int] = []

    def noisy(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return functional.gelu(hidden) * len(calls)

    def run(layers: nn.ModuleList) -> Result:
        calls.clear()
        return one_step(layers)

    layers = blocks(chain, 1)
    layers[0].activation = noisy
    with Engine(layers, policy=where_known(Action.SWAP)) as engine:
        run(layers)
        assert len(calls) == 3, "two micro-batches, and one trial"
        run(layers)
        assert len(calls) == 2
    assert engine.recomputer.refused == {Site(0, "linear", 0): "its recomputation gave different bits"}


def test_an_input_that_nobody_saves_is_not_kept_for_it():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x / 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad / 2

    layers = blocks(lambda block, hidden: block.linear(block.activation(hidden + 1)))
    for layer in layers:
        layer.activation = Half.apply
    engine = compare(layers, one_step, policy=where_known(Action.SWAP))
    assert engine.counters.num_recomputed == 0
    assert all("one of its inputs is not saved" in reason for reason in engine.recomputer.refused.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.relu_(),
        lambda x: x.view(-1, HIDDEN),
        lambda x: torch.cat([x, x])[: len(x)],
        lambda x: torch.cat([x, x])[len(x) :],
    ],
    ids=["in place", "a view", "half of a storage", "its other half"],
)
def test_outputs_that_are_not_a_whole_new_storage_are_left_alone(make: Callable[[torch.Tensor], torch.Tensor]):
    def body(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        start = hidden * 1.5
        return block.linear(block.activation(start))

    layers = blocks(body)
    for layer in layers:
        layer.activation = make
    assert compare(layers, one_step, policy=where_known(Action.SWAP)).counters.num_recomputed == 0


@pytest.mark.parametrize("verify", [False, True])
def test_verify_sees_a_kernel_that_changes_its_mind(verify: bool):
    factor = [1.0]
    layers = blocks(chain, 1)
    layers[0].activation = lambda hidden: functional.gelu(hidden) * factor[0]
    with Engine(layers, policy=where_known(Action.KEEP), verify=verify):
        loss = loss_of(forward(layers, batch()))
        factor[0] = 1.5
        if verify:
            with pytest.raises(VerifyError, match=r"layers\.0/linear/0"):
                loss.backward()
        else:  # what the option is for
            loss.backward()


def test_a_kernel_that_changes_its_size_is_told():
    rows = [None]
    layers = blocks(chain, 1)
    layers[0].activation = lambda hidden: functional.gelu(hidden)[: rows[0]].clone()
    with Engine(layers, policy=where_known(Action.KEEP)):
        loss = loss_of(forward(layers, batch()))
        rows[0] = 3
        with pytest.raises(SwapError, match=r"layers\.0/linear/0: .* has 384 bytes instead of 8192"):
            loss.backward()


def test_bits_decide_not_numbers():
    """NaN equals the same NaN, and 0.0 differs from -0.0."""
    sign = [1.0]

    def kernel(hidden: torch.Tensor) -> torch.Tensor:
        return Zeros.apply(hidden, sign[0])

    class Zeros(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, sign: float) -> torch.Tensor:
            return torch.where(x > 0, torch.nan, 0.0 * sign)

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            return grad, None

    def body(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        norm = block.norm(hidden)
        saved = norm.sin()
        output = block.activation(norm)
        sign[0] = -sign[0] if block.step == 2 else sign[0]
        return block.linear(output) + saved

    layers = blocks(body, 1)
    layers[0].activation = kernel
    policy = Choice(lambda site, producer: Action.RECOMPUTE if producer == ACTIVATION else Action.KEEP)
    with Engine(layers, policy=policy) as engine:
        forward(layers, batch())
        assert engine.recomputer.refused == {}
    layers[0].step, layers[0].activation = 1, kernel
    with Engine(layers, policy=policy) as engine:
        forward(layers, batch())
        assert list(engine.recomputer.refused.values()) == ["its recomputation gave different bits"]
