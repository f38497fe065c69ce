"""Defects to plant in the product: each one the fuzz must find within a few seeds, or it would find nothing at all."""

from __future__ import annotations

from collections.abc import Callable

from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.handle import Alias


class _NoTime:
    def elapsed_ms(self) -> float:
        return 0.0


def uses_before_arrival() -> None:
    """Compute waits neither for an offload before memory is released, nor for a reload before its bytes are used."""
    EmulatedDevice.timed_wait = lambda *_: _NoTime()  # type: ignore[method-assign,assignment,return-value]


def late_writes_unseen() -> None:
    """A part of a storage that is written after its copy began is believed to be in the tier."""
    Alias.counts_with = lambda *_: True  # type: ignore[method-assign,assignment]


PLANTED: dict[str, Callable[[], None]] = {fault.__name__: fault for fault in (uses_before_arrival, late_writes_unseen)}
