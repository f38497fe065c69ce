"""Profiler ranges: names, nesting, listeners."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from megatron.swap.common.instrumentation import Ranges
from tests.engine import Engine, one_forward_one_backward, stack, train_step


@dataclass
class Subject:
    label: str


class Recorder:
    """A timeline that notes begins and ends of ranges, with their threads."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.events.append(("begin", name, threading.get_ident()))
        yield
        self.events.append(("end", name, threading.get_ident()))

    def names(self) -> list[str]:
        return [name for what, name, _ in self.events if what == "begin"]

    def check_nesting(self) -> None:
        """On each thread ranges end in the reverse order of their begins, as NVTX requires."""
        open_ranges: dict[int, list[str]] = {}
        for what, name, thread in self.events:
            stack = open_ranges.setdefault(thread, [])
            if what == "begin":
                stack.append(name)
            else:
                assert stack.pop() == name
        assert not any(open_ranges.values())


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def ranges(recorder: Recorder) -> Ranges:
    ranges = Ranges()
    ranges.start(recorder, lambda: 7)
    return ranges


def test_names(ranges: Ranges, recorder: Recorder):
    with ranges.group("prefetch", Subject("layers.3 mb0"), 412 << 20):
        pass
    with ranges.storage("copy_in", Subject("layers.3/mlp/0 mb1"), 4096), ranges.storage("wait", Subject("l mb0")):
        ranges.memory()
    assert recorder.names() == [
        "prefetch layers.3 mb0 412 MiB", "copy_in layers.3/mlp/0 mb1 4096", "wait l mb0", "memory 7",
    ]  # fmt: skip


def test_backward_ends_with_its_input_or_with_the_next(ranges: Ranges, recorder: Recorder):
    groups = [Subject(f"layers.{layer} mb0") for layer in range(3)]
    ranges.backward(groups[2])
    ranges.backward_over(groups[2])
    ranges.backward(groups[1])
    ranges.backward(groups[0])  # the end of layer 1 was not reported
    ranges.backward_over(groups[1])  # too late: the range of layer 0 is open
    ranges.backward_over(groups[0])
    recorder.check_nesting()
    assert [name for name in recorder.names() if name.startswith("b")] == [
        f"backward layers.{layer} mb0" for layer in (2, 1, 0)
    ]


def test_a_profiler_sees_every_copy_and_every_wait_of_a_storage_in_order(recorder: Recorder):
    layers, schedule = stack(5), one_forward_one_backward(4)
    with Engine(layers) as engine:
        train_step(layers, schedule)  # the order of backward is known from now on
        ranges = engine.manager.ranges
        before = engine.counters.totals()
        ranges.start(recorder, lambda: None)
        ranges.step(4)
        train_step(layers, schedule)
        ranges.stop()
        moved = engine.counters.totals().since(before)
    recorder.check_nesting()
    lives: dict[str, list[str]] = {}
    copied_bytes = {"copy_out": 0, "copy_in": 0}
    for name in recorder.names():
        what, *words = name.split()
        if what in ("copy_out", "release", "copy_in", "wait"):
            lives.setdefault(" ".join(words[:2]), []).append(what)
        if what in copied_bytes:
            copied_bytes[what] += int(words[2])
    in_full = ["copy_out", "release", "copy_in", "wait"]
    assert in_full in lives.values()
    assert all(life == in_full or life == ["copy_out"] for life in lives.values()), lives
    assert copied_bytes == {"copy_out": moved.out_bytes, "copy_in": moved.in_bytes}
    num_micro_batches = len({micro_batch for _, _, micro_batch in schedule})
    for what in ("forward", "backward"):
        noted = [name for name in recorder.names() if name.startswith(f"{what} ")]
        assert sorted(noted) == sorted(
            f"{what} layers.{layer} mb{micro_batch}" for layer in range(5) for micro_batch in range(num_micro_batches)
        )
