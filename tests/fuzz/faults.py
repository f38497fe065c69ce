"""Defects to plant in the product: each one the fuzz must find within a few seeds, or it would find nothing at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megatron.swap.devices.base import Device
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.handle import Alias
from megatron.swap.engine.offload import Offloader


class _NoTime:
    def elapsed_ms(self) -> float:
        return 0.0


def uses_before_arrival() -> None:
    """Compute waits neither for an offload before memory is released, nor for a reload before its bytes are used."""
    EmulatedDevice.timed_wait = lambda *_: _NoTime()  # type: ignore[method-assign,assignment,return-value]


def copies_overtake() -> None:
    """No stream waits for another: a reload overtakes its own offload, a bucket its predecessor."""
    Device.wait = lambda *_: None  # type: ignore[method-assign,assignment]


def late_writes_unseen() -> None:
    """A part of a storage that is written after its copy began is believed to be in the tier."""
    Alias.counts_with = lambda *_: True  # type: ignore[method-assign,assignment]


def never_ends() -> None:
    """A layer's forward never ends."""
    def wait(*_: Any) -> None:
        threading.Event().wait()

    Offloader.end_forward = wait  # type: ignore[method-assign]


PLANTED: dict[str, Callable[[], None]] = {
    fault.__name__: fault for fault in (uses_before_arrival, copies_overtake, late_writes_unseen, never_ends)
}


def plant(name: str) -> None:
    """Plant a defect in this process.

    Raises:
        KeyError: there is none of that name.
    """
    PLANTED[name]()
