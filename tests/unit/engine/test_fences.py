"""Which reads of a slot may still be in flight."""

from typing import Any

from megatron.swap.devices.emulated import EmulatedDevice, EmulatedEvent
from megatron.swap.engine.fences import ReadFences


def test_a_fence_has_passed_with_its_own_read_or_when_reads_are_forgotten_and_not_before() -> None:
    fences = ReadFences(EmulatedDevice())
    events: list[Any] = [EmulatedEvent() for _ in range(3)]
    numbers = [fences.add(event) for event in events]
    assert [fences.event_of(fence) for fence in numbers] == events
    for place, event in enumerate(events[:2]):
        event.trigger()
        assert [fences.have_passed(fence) for fence in (0, *numbers)] == [True] + [at <= place for at in range(3)]
    assert fences.event_of(numbers[2]) is events[2]
    fences.clear()
    assert fences.have_passed(numbers[2])
