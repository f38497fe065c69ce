"""How long steps take on the device, without waiting for it where that can be avoided."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.devices.base import Device, Event, Mark


@dataclass(frozen=True)
class _Span:
    """A step: from its first forward to its end. ``over`` passes when the device has got there."""

    began: Mark
    ended: Mark
    over: Event


class StepClock:
    """Times steps from their first forward on: what lies between steps (evaluation, checkpoints) is none of them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._began: Mark | None = None
        self._last: _Span | None = None

    def begin(self) -> None:
        """A forward begins; the first one of a step counts."""
        if self._began is None:
            self._began = self._device.mark()

    def end(self, wait: bool) -> float | None:
        """A step is over.

        Args:
            wait: for the device, so that the time of this very step is known. Else it is that of the step before.

        Returns:
            Milliseconds; ``None``: not known (yet).
        """
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
        """The last step was another kind of step than the next one."""
        self._last = None
