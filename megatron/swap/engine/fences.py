"""Reads of slots that may still be in flight: a slot is overwritten only after its reads have ended."""

from __future__ import annotations

from collections import deque

from megatron.swap.devices.base import Device, Event


class ReadFences:
    """Numbers the reload copies in the order they are enqueued: a *fence* is such a number; 0: no read."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending: deque[tuple[int, Event]] = deque()
        self._last = 0

    def add(self, event: Event) -> int:
        """Return the fence of the read enqueued last; the read has ended when ``event`` has passed."""
        self._last += 1
        self._pending.append((self._last, event))
        return self._last

    def event_of(self, fence: int) -> Event | None:
        """Return the event after which all reads up to ``fence`` have ended, or None if they have ended already."""
        while self._pending and self._device.has_passed(self._pending[0][1]):
            self._pending.popleft()
        if not self._pending or fence < self._pending[0][0]:
            return None
        return next(event for number, event in self._pending if number >= fence)

    def have_passed(self, fence: int) -> bool:
        """Whether all reads up to ``fence`` have ended."""
        return self.event_of(fence) is None

    def clear(self) -> None:
        """Forget all reads: every one has ended."""
        self._pending.clear()
