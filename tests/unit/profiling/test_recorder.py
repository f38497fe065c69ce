"""Recordings of real graphs under all policies; recording changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from megatron.swap.common.types import ACTIVATION, NORM, PRODUCERS, SwapError
from megatron.swap.profiling.observer import PLAIN, Observer
from megatron.swap.profiling.recording import Event, Recording, SavedStorage, What
from megatron.swap.profiling.timeline import Timeline
from tests.engine import (
    HIDDEN,
    TOKENS,
    Engine,
    Step,
    one_after_the_other,
    one_forward_one_backward,
    stack,
    train_step,
    watch,
)
from tests.unit.engine.test_recompute_chains import Rotary, telling

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"swapped": []},
    "swap": {},
    "swap in small commits": {"commit_bytes": 4096},
    "recompute": {"swapped": [], "recompute": (NORM, ACTIVATION)},
    "swap and recompute": {"recompute": (NORM, ACTIVATION)},
    "mixed": {"swapped": [0, 1, 3], "modules": ["mlp"], "recompute": (NORM,)},
}
F4 = TOKENS * HIDDEN * 4
"""Bytes of hidden states in fp32."""


def record(
    layers: nn.ModuleList, schedule: list[Step], num_steps: int = 2, chunks: list[int] | None = None, **policy: Any
) -> Recording:
    """Record steps after a first one, which is not recorded."""
    with Engine(layers, observer=Observer(), recorded=True, chunks=chunks, **policy) as engine:
        assert engine.recorder is not None
        train_step(layers, schedule, chunks)
        engine.recorder.start(1)
        for number in range(num_steps):
            train_step(layers, schedule, chunks)
            engine.recorder.step_ended(number + 2)
        return engine.recorder.stop()


def storages(recording: Recording) -> list[SavedStorage]:
    return [event.storage for event in recording.events if event.what is What.SAVED and event.storage is not None]


def described(storage: SavedStorage) -> tuple[object, ...]:
    return storage.pass_key.label, storage.site, storage.num_bytes, storage.is_input, storage.has_external_refs


def lives_of(recording: Recording) -> dict[SavedStorage, list[What]]:
    """Return the events of each storage in order; none is saved twice, freed twice, or never freed."""
    held: dict[SavedStorage, int] = {}
    lives: dict[SavedStorage, list[What]] = {}
    for event in recording.events:
        if event.storage is not None:
            lives.setdefault(event.storage, []).append(event.what)
        if event.storage is not None and event.what in (What.SAVED, What.ARRIVED):
            assert not held.get(event.storage), f"{event.storage.site} came twice"
            held[event.storage] = event.num_bytes
        elif event.storage is not None and event.what is What.FREED:
            assert held.pop(event.storage) == event.num_bytes
    # The schedule holds the input of a chunk's first layer.
    assert all(storage.has_external_refs and storage.is_input for storage in held)
    for storage, life in lives.items():
        if storage.is_intermediate:
            assert life == [What.ARRIVED, What.FREED]
            continue
        assert life[0] is What.SAVED
        assert What.ASKED in life, storage.site
        if not storage.has_external_refs:
            assert life[-1] is What.FREED, storage.site
            in_forward = life[: life.index(What.ASKED)].count(What.FREED)
            # A storage that was freed in forward arrives again: reloaded before ASKED, or recomputed after it.
            assert life.count(What.FREED) == 1 + in_forward == 1 + life.count(What.ARRIVED), storage.site
    return lives


SCHEDULES = {
    "one after the other": (one_after_the_other(2), None),
    "1f1b": (one_forward_one_backward(4), None),
    "1f1b, two chunks": (one_after_the_other(3), [3, 2]),
}


def steps_of(name: str) -> tuple[list[Step], list[int] | None]:
    schedule, chunks = SCHEDULES[name]
    if chunks is not None:
        schedule = [
            (what, chunk, mb)
            for what, _, mb in schedule for chunk in ((0, 1) if what == "F" else (1, 0))
        ]  # fmt: skip
    return schedule, chunks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recordings_are_the_same_under_all_policies(schedule: str) -> None:
    """Saved storages, and what backward asks for and frees in its order."""
    steps, chunks = steps_of(schedule)
    num_storages = len({mb for _, _, mb in steps}) * 5 * 13
    seen = []
    for policy in POLICIES.values():
        recording = record(stack(5), steps, 1, chunks, **policy)
        assert len(lives_of(recording)) == num_storages
        moments = [(one.pass_key.label, list(one.moments)) for one in Timeline(recording).passes]
        seen.append(([described(storage) for storage in storages(recording)], moments))
    assert len(seen[0][0]) == num_storages
    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", ["keep", "swap in small commits", "swap and recompute"])
def test_not_a_bit_changes(schedule: str, policy: str) -> None:
    steps, chunks = steps_of(schedule)
    layers = stack(5)
    plain = train_step(copy.deepcopy(layers), steps, chunks)
    with Engine(layers, observer=Observer(), recorded=True, chunks=chunks, **POLICIES[policy]) as engine:
        assert engine.recorder is not None
        for number in range(2):
            engine.recorder.start(number)
            assert train_step(layers, steps, chunks).same_as(plain)
            engine.recorder.step_ended(number + 1)
            engine.recorder.stop()
            assert train_step(layers, steps, chunks).same_as(plain)


class Small(nn.Module):
    """Three saved storages, whose events can be written down by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden_states.exp()).tanh()  # exp saves its output, which the linear saves again


def names(events: tuple[Event, ...]) -> list[str]:
    found = []
    for event in events:
        subject = event.storage.site if event.storage else event.pass_key.label if event.pass_key else ""
        found.append(f"{event.what.name} {subject}".strip())
    return found


def test_a_graph_by_hand() -> None:
    layers = nn.ModuleList([Small(), Small()])
    recording = record(layers, one_after_the_other(1), num_steps=1, swapped=[])

    def backward(layer: int) -> list[str]:
        exp = [f"ASKED {site}" for site in ("layer/1", "layer/0")]
        return [
            f"BACKWARD_BEGIN layers.{layer} mb0", exp[0], "FREED layer/1",
            # exp's output: the linear unpacks it first and drops it; exp unpacks it last
            "ASKED layer/0", "ASKED layer/0", "FREED layer/0", f"BACKWARD_END layers.{layer} mb0",
        ]  # fmt: skip

    forwards = [
        noted for layer in (0, 1)
        for noted in (f"FORWARD_BEGIN layers.{layer} mb0", "SAVED layer/0", "SAVED layer/1",
                     f"FORWARD_END layers.{layer} mb0")
    ]  # fmt: skip
    assert names(recording.events) == ["STEP", *forwards, *backward(1), *backward(0), "STEP"]
    assert [event.num_bytes for event in recording.events if event.what is What.SAVED] == [F4] * 4


def test_memory_is_what_the_observer_holds() -> None:
    """The memory in use is at least the bytes of live saved storages, at each event."""
    held = 0
    recording = record(stack(3), one_after_the_other(2), swapped=[])
    static = recording.events[0].now_bytes
    for event in recording.events:
        assert event.peak_bytes >= max(held + static, event.now_bytes)
        held += {What.SAVED: 1, What.FREED: -1}.get(event.what, 0) * event.num_bytes
    assert max(event.peak_bytes for event in recording.events) > static + 3 * 2 * F4


class Keeping(nn.Module):
    """Passes the linear's input to a caller that keeps it."""

    def __init__(self, keep: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.keep = keep

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(hidden_states * 2)
        self.keep(inner)
        return hidden_states + self.linear(inner)


@pytest.mark.parametrize("policy", ["keep", "swap"])
def test_what_others_hold_is_reported(policy: str) -> None:
    kept: list[torch.Tensor] = []
    layers = nn.ModuleList([Keeping(kept.append), *(Keeping(lambda tensor: None) for _ in range(3))])
    found = storages(record(layers, one_after_the_other(1), num_steps=1, **POLICIES[policy]))
    held = [(storage.pass_key.layer, storage.site) for storage in found if storage.has_external_refs]
    assert held == [(0, "layer/0")]
    assert len(found) == 4


SOURCES = {
    NORM: {"attention.linear_qkv/0": ["norm1/0"], "mlp.linear_fc1/0": ["norm2/0"]},
    ACTIVATION: {"mlp.linear_fc2/0": ["mlp/0"]},
}


class TestProducers:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_they_are_known_where_storages_are_recomputed(self, policy: str) -> None:
        found = storages(record(stack(3), one_after_the_other(1), **POLICIES[policy]))
        made = {storage.site: [one.site for one in storage.recompute_inputs] for storage in found if storage.producer}
        assert made == {
            site: sources for kind in POLICIES[policy].get("recompute", ()) for site, sources in SOURCES[kind].items()
        }
        assert not any(storage.intermediates for storage in found)

    def test_trials_are_in_the_first_step_alone_one_a_site(self) -> None:
        layers = stack(3)
        with Engine(layers, observer=Observer(), recorded=True, swapped=[], recompute=(NORM, ACTIVATION)) as engine:
            assert engine.recorder is not None
            tried = []
            for step in (1, 2):
                engine.recorder.start(step)
                train_step(layers, one_after_the_other(2))
                engine.recorder.step_ended(step + 1)
                events = engine.recorder.stop().events
                tried.append([one.of for one in events if one.what is What.WORK_BEGIN and one.work == "trial"])
        assert len(tried[0]) == len(set(tried[0])) == 3 * 3
        assert tried[1] == []

    def test_a_kernel_that_does_not_reproduce_its_output_is_no_producer(self) -> None:
        layers = stack(2)
        calls = iter(range(100))

        def drifting(tensor: torch.Tensor) -> torch.Tensor:
            return functional.gelu(tensor) + next(calls)

        layers[0].mlp.activation = drifting
        found = storages(record(layers, one_after_the_other(2), swapped=[], recompute=(ACTIVATION,)))
        activations = [storage for storage in found if storage.site == "mlp.linear_fc2/0"]
        assert {(storage.pass_key.layer, storage.producer) for storage in activations} == {(0, None), (1, ACTIVATION)}

    def test_what_comes_back_counts_before_it_is_used(self) -> None:
        """The norm's input is reloaded ahead, is read when the norm is recomputed, and only then unpacked."""
        recording = record(stack(4), one_after_the_other(1), num_steps=1, recompute=(NORM,))
        of_first = [event for event in recording.events if event.storage and event.storage.pass_key.layer == 0]
        noted = names(tuple(of_first))
        begin = noted.index("ARRIVED norm2/0")
        order = [
            noted.index(what, begin) for what in (
                "ASKED mlp.linear_fc1/0", "ARRIVED mlp.linear_fc1/0", "ASKED norm2/0", "FREED norm2/0",
            )
        ]  # fmt: skip
        assert order == sorted(order)

    def test_all_memory_belongs_to_a_saved_storage(self) -> None:
        """Every byte that the observer counts belongs to a saved storage, under all policies."""
        for policy in POLICIES.values():
            read = Timeline(record(stack(5), one_after_the_other(2), **policy))
            assert {level for one in read.passes for level in one.temporaries.values()} == {0}

    @pytest.mark.parametrize("swapped", [[], [0, 1, 2]], ids=["keep", "swap"])
    def test_what_is_made_on_the_way_comes_and_goes_in_backward(self, swapped: list[int]) -> None:
        layers = stack(3, lambda: Rotary(True))
        with Engine(layers, observer=Observer(), recorded=True, swapped=swapped, recompute=PRODUCERS) as engine:
            assert engine.recorder is not None
            telling(engine, layers)
            train_step(layers, one_after_the_other(2))
            engine.recorder.start(1)
            train_step(layers, one_after_the_other(2))
            engine.recorder.step_ended(2)
            lives = lives_of(engine.recorder.stop())
        assert sum(storage.is_intermediate for storage in lives) == 3 * 2
        assert {storage.num_bytes for storage in lives if storage.is_intermediate} == {3 * F4}
        for storage in lives:
            parts = storage.site.startswith("attention/") and not storage.is_intermediate
            assert storage.intermediates == (("attention/0+1",) if parts else ())


class TestWholeLayers:
    @pytest.mark.parametrize("policy", ["keep", "swap", "swap and recompute"])
    def test_their_inputs_are_all_that_they_save(self, policy: str) -> None:
        layers = stack(5)
        plain = train_step(copy.deepcopy(layers), one_after_the_other(2))
        recording = record(layers, one_after_the_other(2), 1, whole=[1, 3], **POLICIES[policy])
        assert train_step(layers, one_after_the_other(2)).same_as(plain)
        found = [storage for storage in lives_of(recording) if storage.pass_key.layer in (1, 3)]
        assert [(one.pass_key.label, one.site, one.num_bytes) for one in found] == [
            (f"layers.{layer} mb{mb}", "checkpoint/0", F4) for mb in (0, 1) for layer in (1, 3)
        ]
        again = [one.of for one in recording.events if one.what is What.WORK_BEGIN and one.work == "recompute"]
        assert [of for of in again if "/" not in of] == [f"layers.{layer} mb{mb}" for mb in (0, 1) for layer in (3, 1)]


class TestOnAndOff:
    def test_off_nothing_of_it_stands_in_the_graph(self) -> None:
        layers = stack(1)
        with Engine(layers, observer=Observer(), recorded=True) as engine:
            assert engine.recorder is not None
            packed: list[object] = []
            original = engine.saved_tensors.unpack
            engine.saved_tensors.unpack = lambda one: packed.append(one) or original(one)  # type: ignore[method-assign,assignment,func-returns-value]
            train_step(layers, one_after_the_other(1))
            assert packed
            assert not any(getattr(one, "record", None) is not None for one in packed)
            packed.clear()
            engine.recorder.start(1)
            train_step(layers, one_after_the_other(1))
            engine.recorder.abandon()
            assert any(getattr(one, "record", None) is not None for one in packed)
            assert not engine.manager.ranges.is_on

    def test_without_a_whole_step_there_is_nothing_to_build_from(self) -> None:
        with Engine(stack(1), observer=Observer(), recorded=True) as engine:
            assert engine.recorder is not None
            with pytest.raises(SwapError, match="nothing was recorded: start, then step_ended at least once"):
                engine.recorder.stop()
            engine.recorder.start(1)
            with pytest.raises(SwapError, match="nothing was recorded"):
                engine.recorder.stop()
            with pytest.raises(SwapError, match="stop it first"):
                engine.recorder.start(1)

    def test_chunks_are_watched_where_gradients_are_wanted(self) -> None:
        with Engine(stack(1), observer=Observer(), recorded=True) as engine:
            assert engine.recorder is not None
            chunks = [nn.Linear(4, 4), nn.Linear(4, 4)]
            undo = [watch(engine.recorder, chunk) for chunk in chunks]
            engine.recorder.start(1)
            for chunk in chunks:
                chunk(torch.ones(4))
                with torch.no_grad():
                    chunk(torch.ones(4))
            undo[0]()
            chunks[0](torch.ones(4))
            engine.recorder.step_ended(2)
            events = engine.recorder.stop().events
        noted = [event for event in events[1:-1] if event.what in (What.CHUNK_BEGIN, What.CHUNK_END)]
        assert [(event.what.name, event.chunk) for event in noted] == [
            ("CHUNK_BEGIN", 0), ("CHUNK_END", 0), ("CHUNK_BEGIN", 1), ("CHUNK_END", 1),
        ]  # fmt: skip

    def test_an_evaluation_is_told_as_a_whole_without_its_memory(self) -> None:
        observer = Observer()
        with Engine(stack(1), observer=observer, recorded=True) as engine:
            assert engine.recorder is not None
            chunks = [nn.Linear(4, 4), nn.Linear(4, 4)]
            for chunk in chunks:
                watch(engine.recorder, chunk)
            engine.recorder.start(1)
            for evaluates in (False, True, True, False):
                for chunk in chunks:
                    with torch.set_grad_enabled(not evaluates):
                        chunk(torch.ones(4))
                if evaluates:
                    observer.around(PLAIN).pack(torch.ones(1 << 20))
            engine.recorder.step_ended(2)
            recording = engine.recorder.stop()
        names = [event.what.name for event in recording.events[1:-1]]
        step = ["CHUNK_BEGIN", "CHUNK_END"] * 2
        assert names == [*step, "WORK_BEGIN", "WORK_END", *step]
        assert Timeline(recording).peak_bytes < 1 << 20
