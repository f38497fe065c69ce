"""Faults planted in the real engine, and a slowed link: the analysis of a trace must report them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.traces.analysis import Analysis, analyse
from benchmarks.traces.reader import read_trace
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.devices import emulated
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.reload import Reloader
from megatron.swap.profiling.profiler import Profiler
from tests.engine import Engine, one_after_the_other, plant_fault, stack, train_step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="traces the emulation in the tests' process")
NUM_STEPS = 4


class Link:
    """The emulation's link, which a test can slow down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.extra_s = 0.0
        move = emulated._memmove

        def moved_slowly(target: int, source: int, num_bytes: int) -> None:
            move(target, source, num_bytes)
            time.sleep(self.extra_s)

        monkeypatch.setattr(emulated, "_memmove", moved_slowly)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    return Link(monkeypatch)


def traced(folder: Path, before_step: Callable[[], None] = lambda: None, link_gb_s: float | None = None) -> Analysis:
    """Train a small stack on the emulated device, trace the last step, and analyse the trace."""
    layers = stack(6)
    ranges = Ranges()
    device = emulated.EmulatedDevice(longest_delay_s=0.002, ranges=ranges)
    with Engine(layers, device=device, ranges=ranges) as engine:
        profiler = Profiler(str(folder), NUM_STEPS, NUM_STEPS, 0, ranges, lambda: None)
        for iteration in range(1, NUM_STEPS + 1):
            before = engine.counters.totals()
            if iteration == NUM_STEPS:
                before_step()
            train_step(layers, one_after_the_other(2))
            profiler.step_ended(iteration)
        moved = engine.counters.totals().since(before)
    assert profiler.path is not None
    step = {
        "iteration": NUM_STEPS, "swapped_out_bytes": moved.out_bytes, "swapped_in_bytes": moved.in_bytes,
        "num_out_copies": moved.num_out_copies, "num_in_copies": moved.num_in_copies,
    }  # fmt: skip
    return analyse(read_trace(profiler.path), {"steps": [step]}, link_gb_s)


def test_the_engine_as_it_is_has_a_clean_trace(tmp_path: Path):
    analysis = traced(tmp_path)
    assert analysis.is_clean, (analysis.ordering.violations, analysis.mismatches)
    assert all(analysis.ordering.num_checked.values())


STALL = "self._counters.add_stall(self._device.timed_wait"


@pytest.mark.parametrize(
    ("owner", "method", "removed", "rule"),
    [
        (Offloader, "_drop", f"{STALL}(compute, handle.out_event))", "out_before_reuse"),
        (Reloader, "fetch", f"{STALL}(compute, handle.in_event))", "in_before_use"),
        (Reloader, "_read", "self.lane.wait(handle.out_event)", "in_after_out"),
    ],
)
def test_a_wait_that_is_removed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Link, owner: type, method: str, removed: str, rule: str
):
    def fault() -> None:
        link.extra_s = 0.02
        plant_fault(monkeypatch, owner, method, removed, "pass")
        if method == "_read":  # compute waits for the copy out too, which would order the copy in behind it
            plant_fault(
                monkeypatch, Offloader, "_drop",
                f"{STALL}(compute, handle.out_event))", "pass",
            )  # fmt: skip

    analysis = traced(tmp_path, fault)
    assert rule in {violation.rule for violation in analysis.ordering.violations}
    assert not analysis.is_clean


def test_a_copy_that_the_engine_does_not_count_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fault() -> None:
        plant_fault(monkeypatch, Reloader, "_read", "self._counters.num_in_copies += num_copies", "pass")

    analysis = traced(tmp_path, fault)
    assert not analysis.ordering.violations
    assert analysis.mismatches


def test_a_link_made_slow_is_found_and_shows_as_stalls(tmp_path: Path, link: Link):
    fast = traced(tmp_path / "fast")
    fast_gb_s = min(way.gb_per_s for way in fast.links.values())

    def throttle() -> None:
        link.extra_s = 0.02

    slow = traced(tmp_path / "slow", throttle, link_gb_s=fast_gb_s)
    assert not slow.ordering.violations
    assert len([text for text in slow.mismatches if "holds it up" in text]) == 2
    # Copies are hidden no longer: compute is idle for a good part of their delay.
    held_up_ms = 20 * (slow.links["out"].num_copies + slow.links["in"].num_copies)
    assert slow.steps[0].stalled_ms > held_up_ms / 2
    assert slow.steps[0].stalled_ms > 2 * fast.steps[0].stalled_ms
