"""Layers that are not measured, since one like them was and the host has no room: the same profile, the same bits."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import GIB, UsageError
from megatron.swap.forecast.profiles import load_profile
from megatron.swap.layers import measure as alike_runs
from megatron.swap.layers.measure import LEAST_MEASURED, AlikeRuns, kind_of
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.planner.profile import LayerClass
from tests.plain_loop import WIDTH, Mlp, mlps, rows, train
from tests.planned_loop import NUM_STEPS, QUIET, check, unswapped


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The host never has room. Returns what was found for each run that was measured, or was like one."""
    found: list[tuple[int, ...]] = []
    find = AlikeRuns.find

    def noting(self: AlikeRuns, kind: Any) -> tuple[int, ...]:
        found.append(find(self, kind))
        return found[-1]

    monkeypatch.setattr(HostPool, "has_room", lambda *_: False)
    monkeypatch.setattr(AlikeRuns, "find", noting)
    return found


def trained(model: nn.Module, data: Callable[[int], torch.Tensor], fraction: float, **options: Any) -> swap.Stats:
    """Train with a budget of ``fraction`` of what autograd holds, and check losses, gradients, weights and peaks."""
    plain, full_gib = unswapped(model, data)
    copied = copy.deepcopy(model)
    with swap.activations(copied, memory_gib=fraction * full_gib, **{**QUIET, **options}) as swapped:
        assert train(copied, data, NUM_STEPS).same_as(plain)
        check(swapped.stats())
        return swapped.stats()


def shape(entry: LayerClass) -> LayerClass:
    """Return ``entry`` without its times. Of a time to recompute it only says whether it is known."""
    sites = tuple(
        replace(
            one, saved_at_ms=0, needed_at_ms=0, done_at_ms=0, gone_at_ms=None,
            recompute_ms=None if one.recompute_ms is None else 1,
        )
        for one in entry.sites
    )  # fmt: skip
    sections = tuple(replace(one, recompute_ms=1) for one in entry.sections)
    return replace(entry, forward_ms=0, backward_ms=0, host_ms=0, temporaries=(), sites=sites, sections=sections)


@pytest.mark.slow
def test_the_profile_is_that_of_all_layers(
    no_room: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    model = mlps(10)
    profiles = {}
    for name in ("some", "all"):
        if name == "all":
            monkeypatch.setattr(AlikeRuns, "find", lambda *_: ())
        path = tmp_path / f"{name}.json"
        trained(model, rows, 0.6, save_profile=str(path))
        profiles[name] = load_profile(path)
    assert no_room[:10] == [(), (), (), *7 * [(1, 2)]]
    some, every = profiles["some"], profiles["all"]
    assert [shape(entry) for entry in some.layers] == [shape(entry) for entry in every.layers]
    assert some.chunks == every.chunks
    assert some.non_layer.kept_gib == every.non_layer.kept_gib
    assert some.static_gib == every.static_gib


def test_little_is_held_while_steps_are_measured(no_room: list[tuple[int, ...]]) -> None:
    """Two layers are measured, and one runs again; without a host that is what the device holds, beside inputs."""
    torch.manual_seed(7)
    model, layers = mlps(24), 24
    full_gib = unswapped(model, rows)[1]
    of_layer, held = full_gib / layers, []
    with swap.activations(model, memory_gib=full_gib, **QUIET) as swapped:
        for step in range(4):
            train(model, rows, 1)
            held.append(0.0 if swapped.stats().peak_gib is None else swapped.stats().peak_gib)
            assert swapped.stats().stage == "profile", step
    inputs_gib = layers * rows(0).nbytes / GIB
    assert no_room.count(()) < len(no_room) / 4
    assert 0 < max(filter(None, held)) <= (1 + LEAST_MEASURED + 1) * of_layer + inputs_gib


class Counting(Mlp):
    """A layer with a buffer that counts what it has seen."""

    def __init__(self, counts: bool = True) -> None:
        super().__init__()
        self.counts = counts
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.seen += 1
        return super().forward(hidden) * (1 + 0.01 * self.seen)


def test_one_that_only_looks_alike_is_refused(no_room: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(*(Counting(counts=number == 5) for number in range(6)))
    with (
        swap.activations(model, memory_gib=1.0, **QUIET),
        pytest.raises(UsageError, match=r"Counting is like other layers and yet changes .* Raise host_gib"),
    ):
        train(model, rows)


def test_kinds_are_told_apart() -> None:
    class Wider(Mlp):
        pass

    one, hidden = Mlp(), rows(0)
    kinds = [
        kind_of(one, [hidden], None), kind_of(Mlp(2 * WIDTH), [hidden], None), kind_of(Wider(), [hidden], None),
        kind_of(Mlp().requires_grad_(False), [hidden], None), kind_of(one, [hidden.requires_grad_()], None),
        kind_of(one, [hidden[:8]], None), kind_of(one, [hidden, hidden], None),
        kind_of(one, [hidden], [torch.ops.aten.add.Tensor]), kind_of(one, [hidden], None, "offloaded"),
        kind_of(one, [hidden.to_sparse()], None),
    ]  # fmt: skip
    assert len(set(kinds)) == len(kinds)
    assert kind_of(Mlp(), [rows(1)], None) == kinds[0]


def test_room_decides() -> None:
    room = 3
    runs = AlikeRuns(lambda: True, lambda num_bytes: num_bytes <= room)
    for forward in range(2):
        runs.begin_forward()
        for number in range(alike_runs.LEAST_MEASURED):
            assert runs.find("kind") == (), forward
            runs.note("kind", number, 3, [])
        assert runs.find("kind") == ()
        assert runs.find("other") == ()
        room = 2
        assert runs.find("kind") == tuple(range(alike_runs.LEAST_MEASURED))
        room = 3
    runs.refuse("kind")
    room = 0
    assert runs.find("kind") == ()


def test_what_the_model_changes_behind_a_layer_is_not_read_again() -> None:
    runs, hidden = AlikeRuns(lambda: True, lambda _: False), rows(0)
    for _ in range(2):
        for number in range(alike_runs.LEAST_MEASURED):
            runs.note("kind", number, 3, [hidden])
        hidden.add_(1)
        assert runs.find("kind") == ()
        runs.begin_forward()
    for number in range(alike_runs.LEAST_MEASURED):
        runs.note("other", number, 3, [hidden])
    assert len(runs.find("other")) == alike_runs.LEAST_MEASURED
