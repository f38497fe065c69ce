"""Models that change, free or alias tensors: recomputing is equal to the bit, refused, or raises plain autograd's
error."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron.swap.common.types import ACTIVATION, PRODUCERS, Action, Site
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


def changed_behind_autograds_back(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    output = block.norm(hidden)
    output.data.mul_(2)
    return block.linear(output)


@pytest.mark.parametrize(("body", "num_recomputed", "reason"), [
    (input_changed_later, 3, "one of its inputs was changed in place"),
    (output_changed_later, 3, "it was changed in place after it was computed"),
    (changed_behind_autograds_back, 0, "its recomputation gave different bits"),
    (lambda block, hidden: block.linear(block.activation(hidden + 1)), 0, "one of its inputs is not saved"),
])  # fmt: skip
def test_what_cannot_be_made_again_is_refused(body: Callable, num_recomputed: int, reason: str) -> None:
    """The first two change something from the second micro-batch on."""
    engine = compare(doubling(body), num_steps=1, policy=where_known(Action.SWAP))
    assert engine.counters.num_recomputed == num_recomputed
    assert any(reason in one for one in engine.recomputer.refused.values())


def addresses_reused(block: Block, hidden: torch.Tensor) -> torch.Tensor:
    """Save and free each norm's output. Later saved tensors of its size may get its address."""
    for _ in range(4):
        hidden = block.linear(block.norm(hidden)).sin().exp().tanh()
    return hidden


def test_a_reused_address_is_a_new_storage() -> None:
    compare(blocks(addresses_reused, 6), num_steps=4, policy=where_known(Action.SWAP))


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


@pytest.mark.parametrize("make", [
    lambda x: x.relu_(), lambda x: x.view(-1, HIDDEN), lambda x: torch.cat([x, x])[: len(x)],
    lambda x: torch.cat([x, x])[len(x) :],
], ids=["in place", "a view", "half of a storage", "its other half"])  # fmt: skip
def test_outputs_that_are_not_a_whole_new_storage_are_left_alone(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layers = blocks(lambda block, hidden: block.linear(block.activation(hidden * 1.5)))
    for layer in layers:
        layer.activation = make
    assert compare(layers, policy=where_known(Action.SWAP)).counters.num_recomputed == 0


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


class Zeros(torch.autograd.Function):
    """NaN, and zeros of the sign that ``SIGN`` has."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, torch.nan, 0.0 * SIGN[0])

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


SIGN = [1.0]


@pytest.mark.parametrize(("sign", "refused"), [(1.0, []), (-1.0, ["its recomputation gave different bits"])])
def test_bits_decide_not_numbers(sign: float, refused: list[str]) -> None:
    """NaN equals the same NaN, and 0.0 differs from -0.0."""
    SIGN[0] = 1.0

    def body(block: Block, hidden: torch.Tensor) -> torch.Tensor:
        norm = block.norm(hidden)
        saved = norm.sin()
        output = block.activation(norm)
        SIGN[0] = sign
        return block.linear(output) + saved

    layers = blocks(body, 1)
    layers[0].activation = Zeros.apply
    policy = Choice(lambda site, producer: Action.RECOMPUTE if producer == ACTIVATION else Action.KEEP)
    with Engine(layers, policy=policy) as engine:
        forward(layers, batch())
        assert list(engine.recomputer.refused.values()) == refused
