"""Times training steps on the device, without waiting for the device unless asked to."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.devices.base import Device, Event, Mark


@dataclass(frozen=True)
class _Span:
    """A step from its first forward to its end. ``over`` passes when the device has reached the end."""

    began: Mark
    ended: Mark
    over: Event


class StepClock:
    """Times steps from their first forward to their end. Evaluation and checkpoints between steps do not count."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began: Mark | None = None
        self._last: _Span | None = None

    def begin(self) -> None:
        """Begin a forward. The first call of a step starts the clock."""
        if self._began is None:
            self._began = self._device.mark()

    def end(self, wait: bool) -> float | None:
        """End a step, and return its duration in ms (``wait``), or that of the step before; None if not yet known."""
        last, self._last = self._last, None
        if self._began is not None:
            stream = self._device.current_stream()
            self._last = _Span(self._began, self._device.mark(), self._device.record(stream))
            self._began = None
        if wait:
            self._device.synchronize()
            last = self._last
        if last is None or not self._device.has_passed(last.over):
            return None
        return last.ended.elapsed_ms_since(last.began)

    def forget(self) -> None:
        """Drop the time of the last step, which says nothing of the next ones."""
        self._last = None
