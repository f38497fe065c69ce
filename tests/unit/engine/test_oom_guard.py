"""The out-of-memory guard: on an emulated device with too little memory training continues, equal to the bit."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.types import ACTIVATION, KIB, LINEAR, MIB, NORM, SwapError, UsageError
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.handle import Handle
from megatron.swap.engine.reload import Reloader
from megatron.swap.native.guarding import native
from tests.engine import (
    Engine,
    HeldEvent,
    Layer,
    Result,
    Step,
    batch,
    forward,
    interleaved,
    loss_of,
    one_after_the_other,
    one_forward_one_backward,
    result,
    stack,
    train_step,
)
from tests.sizes import sized
from tests.unit.native.helpers import NEEDS_COMPILER

pytestmark = NEEDS_COMPILER

PIPELINE = one_forward_one_backward(3)


@pytest.fixture(autouse=True)
def unlimited() -> Iterator[None]:
    yield
    native().unlimit_ram()


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of ``run`` on the device, beyond the bytes before it."""
    gc.collect()
    before = native().ram_in_use()
    native().limit_ram(1 << 40)
    run()
    native().unlimit_ram()
    return native().ram_peak() - before


def limited(run: Callable[[], Any], num_bytes: float) -> Any:
    """Return the result of ``run`` with this much free device memory."""
    gc.collect()
    native().limit_ram(int(num_bytes))
    try:
        return run()
    finally:
        native().unlimit_ram()


def evict_everything() -> None:
    """Allocate more than there is on a full device, so that the guard evicts all that it can."""
    with pytest.raises(torch.OutOfMemoryError):
        limited(lambda: torch.empty(1 << 40, dtype=torch.uint8), 0)


def plain_backward(layers: nn.ModuleList, num_backwards: int = 1) -> Result:
    layers = copy.deepcopy(layers)
    loss = loss_of(forward(layers, batch()))
    for _ in range(num_backwards):
        loss.backward(retain_graph=True)
    return result(layers, loss)


def test_a_run_that_dies_without_it_goes_on_with_it() -> None:
    layers = stack(6)
    plain = train_step(copy.deepcopy(layers), one_after_the_other(2))
    with Engine(layers, swapped=(), guarded=True) as engine:
        train_step(layers, one_after_the_other(2))
        peak = peak_bytes(lambda: train_step(layers, one_after_the_other(2)))
        assert engine.guard.take_rescues() == []
        native().limit_ram(int(0.7 * peak))
        for _ in range(3):
            assert train_step(layers, one_after_the_other(2)).same_as(plain)
            rescues = engine.guard.take_rescues()
            assert rescues
        native().unlimit_ram()
    native().limit_ram(int(0.7 * peak))
    with pytest.raises(torch.OutOfMemoryError, match="The emulated device is out of memory"):
        train_step(copy.deepcopy(layers), one_after_the_other(2))


KEPT = pytest.mark.parametrize("swapped", [(), None], ids=["kept", "swapped"])
NOTHING_RELEASED = {"commit_bytes": 1, "window_bytes": 1 << 30, "ends_in_loss": False}


@pytest.mark.parametrize("num_backwards", [1, 2])
@KEPT
@pytest.mark.parametrize("verify", [False, True])
def test_everything_is_taken_between_forward_and_backward(
    num_backwards: int, swapped: tuple[int, ...] | None, verify: bool
) -> None:
    layers = stack(4)
    plain = plain_backward(layers, num_backwards)
    with Engine(layers, swapped, guarded=True, verify=verify, **NOTHING_RELEASED) as engine:
        loss = loss_of(forward(layers, batch()))
        evict_everything()
        for _ in range(num_backwards):
            loss.backward(retain_graph=True)
        assert result(layers, loss).same_as(plain)
        assert engine.counters.num_late > 0


def test_what_was_prefetched_may_be_taken_twice() -> None:
    layers = stack(6)
    plain = plain_backward(layers)
    with Engine(layers, swapped=(), guarded=True, window_bytes=1 << 30) as engine:
        train_step(layers, one_after_the_other(1))
        layers.zero_grad()
        hidden = forward(layers[:5], batch())
        taken: list[list[str]] = []

        def take(grad: torch.Tensor) -> None:
            evict_everything()
            taken.append([str(rescue) for rescue in engine.guard.take_rescues()])

        hidden.register_hook(take)
        loss = loss_of(forward(layers[5:], hidden))
        evict_everything()
        assert engine.guard.take_rescues()
        loss.backward()
        assert result(layers, loss).same_as(plain)
        assert taken[0], "nothing of what layer 5 had brought back was taken"
        assert "0.0 KiB of them copied to the host" in taken[0][0]


def leak_figures(engine: Engine) -> tuple[int, ...]:
    gc.collect()
    assert engine.guard._core is not None
    core = engine.guard._core
    num_left = engine.num_leases, len(engine.guard._offered), len(core.take_evicted())
    return native().ram_in_use(), core.mapped_bytes(), *num_left


def test_a_graph_dropped_while_its_tensors_are_taken_leaves_nothing() -> None:
    layers = stack(4)
    with Engine(layers, swapped=(0, 1), guarded=True) as engine:
        train_step(layers, one_after_the_other(1))
        figures = set()
        for _ in range(4):
            loss = loss_of(forward(layers, batch()))
            evict_everything()
            del loss
            layers.zero_grad()
            train_step(layers, one_after_the_other(1))
            layers.zero_grad()
            engine.guard.take_rescues()
            figures.add(leak_figures(engine))
        assert len(figures) == 1, figures


def test_no_room_on_the_host_is_an_error_not_a_wrong_result() -> None:
    layers = stack(6)
    plain = train_step(copy.deepcopy(layers), PIPELINE)
    for host_bytes, num_rescues in ((128 * KIB, 0), (MIB, 1)):  # no piece of 256 KiB, and some that are soon full
        with Engine(layers, swapped=(), guarded=True, host_bytes=host_bytes) as engine:
            layers.zero_grad()
            train_step(layers, PIPELINE)
            peak = peak_bytes(lambda: train_step(layers, PIPELINE))
            layers.zero_grad()
            with pytest.raises(torch.OutOfMemoryError, match="the host has no room for them"):
                limited(lambda: train_step(layers, PIPELINE), 0.7 * peak)
            layers.zero_grad()
            assert train_step(layers, PIPELINE).same_as(plain)
            assert len(engine.guard.take_rescues()) == num_rescues


def test_one_guard_at_a_time() -> None:
    """A second guard would take over allocations from the first, and when it closes no guard would be left."""
    first, second = stack(2), stack(2)
    with Engine(first, swapped=(), guarded=True):
        with pytest.raises(UsageError, match=r"one at a time\. Close that run first"):
            Engine(second, guarded=True).__enter__()
        with Engine(second):
            train_step(second, PIPELINE)
    with Engine(second, guarded=True) as engine:
        assert engine.guard.is_on


class Shares(Layer):
    """Saves its output, which the next layer saves too, and keeps another tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.aside: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output = super().forward(hidden_states).tanh()
        self.aside = output.exp()  # saved, and held by us
        return output * self.aside.mean()


@pytest.mark.parametrize("swapped", [(), None, (1, 3)], ids=["kept", "swapped", "in turn"])
def test_storages_of_two_layers_and_what_others_hold(
    swapped: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Reloader.fetch

    def checked(reloader: Reloader, handle: Handle, *args: Any) -> torch.UntypedStorage:
        storage = fetch(reloader, handle, *args)
        assert not handle.offer, "what is given out may still be taken"
        return storage

    monkeypatch.setattr(Reloader, "fetch", checked)
    layers = stack(5, Shares)
    plain = plain_backward(layers)
    with Engine(layers, swapped, guarded=True, commit_bytes=1, window_bytes=100_000):
        for _ in range(2):
            layers.zero_grad()
            hidden = batch()
            for layer in layers:
                hidden = layer(hidden)
                aside = layer.aside.clone()
                hidden.register_hook(lambda grad: evict_everything())
                evict_everything()
                assert torch.equal(layer.aside, aside)
            loss = loss_of(hidden)
            loss.backward()
            assert result(layers, loss).same_as(plain)


class EndsInTanh(Layer):
    """Its backward needs its output, which the next layer saves too."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).tanh()


def test_what_two_layers_have_saved_is_evicted_too() -> None:
    layers = stack(3, EndsInTanh)
    with Engine(layers, (), guarded=True) as engine:
        loss = loss_of(forward(layers, batch()))
        evict_everything()
        evicted = {id(handle) for handle in engine.guard.evicted()}
        offered = [reference() for reference, _ in engine.guard._offered.values()]
        of_two = [handle for handle in offered if handle is not None and handle.site.layer < handle.group.key.layer]
        assert len(of_two) == 2
        assert all(id(handle) in evicted for handle in of_two)
        loss.backward()


class Between(Layer):
    """Calls a function in the middle of its backward."""

    in_backward: Callable[[], object] | None = None
    holds = False

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.norm1(hidden_states))
        if self.holds:
            self.held = hidden_states.sin()  # cos of it is saved below
        if self.in_backward is not None:
            hidden_states.register_hook(lambda grad: self.in_backward())
        output = hidden_states + self.mlp(self.norm2(hidden_states))
        return output + self.held.cos() if self.holds else output


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of finalizers, by a planted fault
@pytest.mark.parametrize("moments", [
    {"before backward"}, {"before backward", "in backward"}, {"in backward"}, {"in backward", "holds"},
    {"behind layers"}, {"before backward", "copies are held up"},
], ids=lambda moments: " ".join(sorted(moments)))  # fmt: skip
@KEPT
def test_what_is_evicted_at_any_moment_comes_back(moments: set[str], swapped: tuple[int, ...] | None) -> None:
    """Nothing is evicted that is used soon or that others hold, nor before its copy is there. Host memory is used again
    only when nobody reads it. An offer ends with its handle."""
    layers, held = stack(4, Between), HeldEvent()
    for layer in layers:
        layer.holds = "holds" in moments
    plain = plain_backward(layers)
    with Engine(layers, swapped, guarded=True, device=EmulatedDevice(), **NOTHING_RELEASED) as engine:
        if "copies are held up" in moments:
            engine.device.wait(engine.manager.offload.lane.stream, held)
        hidden = batch()
        for layer in layers:
            layer.in_backward = evict_everything if "in backward" in moments else None
            hidden = layer(hidden)
            if "behind layers" in moments:
                evict_everything()
        loss = loss_of(hidden)
        del hidden
        opened = threading.Timer(0.2, held.open)
        opened.start()
        if "before backward" in moments:
            evict_everything()
            assert held.has_passed() or "copies are held up" not in moments or swapped == ()
        opened.join()
        loss.backward()
        assert result(layers, loss).same_as(plain)
        del loss
        gc.collect()
        assert (engine.num_leases, dict(engine.guard._offered)) == (0, {})


class ChangesTheLast(Layer):
    """Leaves a saved tensor for the next layer, which may change it, drop it, and run out of memory."""

    before: list[ChangesTheLast] = []  # noqa: RUF012
    made: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.made = hidden_states * 1.5
        output = self.made.sin() + super().forward(hidden_states)
        for layer in self.before:
            with torch.no_grad():
                layer.made.zero_()
            del layer.made
            evict_everything()
        return output


def test_a_change_of_what_was_taken_is_told_by_backward() -> None:
    layers = stack(5, ChangesTheLast)
    layers[2].before = [layers[1]]
    with Engine(layers, guarded=True, commit_bytes=1, device=EmulatedDevice()):
        loss = loss_of(forward(layers, batch()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_copy_out_that_failed_is_an_error_not_a_wrong_result() -> None:
    layers = stack(4)
    with Engine(layers, guarded=True, device=EmulatedDevice(), **NOTHING_RELEASED) as engine:
        engine.manager.offload.lane.stream.enqueue(lambda: 1 / 0)
        loss = loss_of(forward(layers, batch()))
        evict_everything()
        with pytest.raises(SwapError, match="an emulated copy failed"):
            loss.backward()
        engine.manager.offload.lane.stream.failure = None


def random_program(number: int) -> tuple[list[Step], list[int] | None, dict[str, Any]]:
    draw = random.Random(number)
    num_layers = draw.randint(2, 4)
    schedule, chunks = draw.choice([
        (one_after_the_other(2), None),
        (one_forward_one_backward(draw.randint(2, 3), draw.randint(2, 3)), None),
        (interleaved(draw.randint(2, 3)), [1, num_layers - 1]),
    ])  # fmt: skip
    recompute = draw.sample([NORM, ACTIVATION, LINEAR], draw.choice([0, 0, 1, 3]))
    return schedule, chunks, {
        "swapped": draw.sample(range(num_layers), draw.randint(0, num_layers)),
        "window_bytes": draw.choice([None, 0, 1, 50_000, 200_000]),
        "commit_bytes": draw.choice([1, 100_000, 16 * MIB]),
        "min_bytes": draw.choice([1, 1024, 10_000]),
        "recompute": recompute,
        "whole": draw.sample(range(num_layers), draw.choice([0, 0, 1, 2])),
        "verify": draw.random() < 0.2,
        "device": EmulatedDevice(draw.choice([0, 0.0002, 0.0005]), seed=number),
        "chunks": chunks,
        "num_layers": num_layers,
        "part": draw.uniform(0.7, 0.97),
    }  # fmt: skip


def outcome_of(number: int) -> str:
    """Return ``rescued``, ``fits``, ``out of memory``, or a description of the error."""
    schedule, chunks, options = random_program(number)
    num_layers, part = options.pop("num_layers"), options.pop("part")
    layers = stack(num_layers)

    def step() -> Result:
        layers.zero_grad()
        return train_step(layers, schedule, chunks)

    plain = train_step(copy.deepcopy(layers), schedule, chunks)
    with Engine(layers, guarded=True, **options) as engine:
        peak = peak_bytes(step)
        layers.zero_grad()
        outcome = "rescued"
        try:
            if not limited(step, part * peak).same_as(plain):
                return "different under the limit"
        except torch.OutOfMemoryError as error:
            if "nothing more to evict" not in str(error):
                return f"no report: {error}"
            outcome = "out of memory"
        if not engine.guard.take_rescues() and outcome == "rescued":
            outcome = "fits"
        if not step().same_as(plain):
            return "different afterwards"
        gc.collect()
        if engine.num_leases or engine.guard._offered:
            return "something was left over"
    return outcome


@pytest.mark.timeout(900)
def test_random_programs() -> None:
    outcomes = {number: outcome_of(number) for number in range(sized(20, 20, 40))}
    wrong = {number: what for number, what in outcomes.items() if what not in ("rescued", "fits", "out of memory")}
    assert not wrong
    found = list(outcomes.values())
    print({what: found.count(what) for what in set(found)})
    assert found.count("rescued") > 0.4 * len(found)
