"""Recordings of real graphs under all policies; recording changes nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megatron.swap.common.types import ACTIVATION, NORM, SwapError
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.recording import Event, Recording, SavedStorage, What
from megatron.swap.profiling.timeline import Timeline
from tests.engine import HIDDEN, TOKENS, Engine, Step, one_after_the_other, one_forward_one_backward, stack, train_step

POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"swapped": []},
    "swap in small commits": {"commit_bytes": 4096},
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


SCHEDULES = {"1f1b": (one_forward_one_backward(4), None), "1f1b, two chunks": (one_after_the_other(3), [3, 2])}


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
@pytest.mark.parametrize("policy", ["keep", "swap and recompute"])
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


SOURCES = {
    NORM: {"attention.linear_qkv/0": ["norm1/0"], "mlp.linear_fc1/0": ["norm2/0"]},
    ACTIVATION: {"mlp.linear_fc2/0": ["mlp/0"]},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_they_are_known_where_storages_are_recomputed(policy: str) -> None:
    found = storages(record(stack(3), one_after_the_other(1), **POLICIES[policy]))
    made = {storage.site: [one.site for one in storage.recompute_inputs] for storage in found if storage.producer}
    assert made == {
        site: sources for kind in POLICIES[policy].get("recompute", ()) for site, sources in SOURCES[kind].items()
    }
    assert not any(storage.intermediates for storage in found)


@pytest.mark.parametrize("policy", ["keep", "swap and recompute"])
def test_their_inputs_are_all_that_they_save(policy: str) -> None:
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


def test_without_a_whole_step_there_is_nothing_to_build_from() -> None:
    with Engine(stack(1), observer=Observer(), recorded=True) as engine:
        assert engine.recorder is not None
        with pytest.raises(SwapError, match="nothing was recorded: start, then step_ended at least once"):
            engine.recorder.stop()
        engine.recorder.start(1)
        with pytest.raises(SwapError, match="nothing was recorded"):
            engine.recorder.stop()
        with pytest.raises(SwapError, match="stop it first"):
            engine.recorder.start(1)
