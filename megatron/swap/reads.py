"""Copies back to the device that may still be under way: what they read is not written before they are through."""

from __future__ import annotations

from collections import deque

from megatron.swap.devices.base import Device, Event


class Reads:
    """Numbers them in order: a *fence* is such a number; 0 is none."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._under_way: deque[tuple[int, Event]] = deque()
        self._last = 0

    def add(self, event: Event) -> int:
        """A read was enqueued that is through when ``event`` has passed: its fence."""
        self._last += 1
        self._under_way.append((self._last, event))
        return self._last

    def event_of(self, fence: int) -> Event | None:
        """What to wait for so that all reads up to ``fence`` are through; ``None``: they are."""
        while self._under_way and self._device.has_passed(self._under_way[0][1]):
            self._under_way.popleft()
        if not self._under_way or fence < self._under_way[0][0]:
            return None
        return next(event for number, event in self._under_way if number >= fence)

    def have_passed(self, fence: int) -> bool:
        """Whether all up to ``fence`` are through."""
        return self.event_of(fence) is None

    def clear(self) -> None:
        """All are through."""
        self._under_way.clear()
