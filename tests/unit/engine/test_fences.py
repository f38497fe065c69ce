"""Which reads of a slot may still be in flight."""

from __future__ import annotations

from typing import Any

from megatron.swap.devices.emulated import EmulatedDevice, EmulatedEvent
from megatron.swap.engine.fences import ReadFences


def test_a_fence_has_passed_with_its_own_read_and_not_before() -> None:
    fences = ReadFences(EmulatedDevice())
    events: list[Any] = [EmulatedEvent() for _ in range(3)]
    first, second, third = [fences.add(event) for event in events]
    assert [fences.event_of(fence) for fence in (first, second, third)] == events
    assert fences.have_passed(0)
    events[0].trigger()
    assert fences.have_passed(first)
    assert fences.event_of(second) is events[1]
    events[1].trigger()
    events[2].trigger()
    assert fences.have_passed(second)
    assert fences.have_passed(third)


def test_reads_that_are_forgotten_have_passed() -> None:
    fences = ReadFences(EmulatedDevice())
    event: Any = EmulatedEvent()
    fence = fences.add(event)
    assert not fences.have_passed(fence)
    fences.clear()
    assert fences.have_passed(fence)
