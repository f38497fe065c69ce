"""Defects to plant in the product: each one the fuzz must find within a few seeds, or it would find nothing at all."""

import threading
from collections.abc import Callable
from typing import Any

from megatron.swap.devices.base import Device
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine import run_prints
from megatron.swap.engine.handle import Alias
from megatron.swap.engine.layer_state import LayerState
from megatron.swap.engine.offload import Offloader
from megatron.swap.engine.recomputed_run import CheckedRun, RunChecks
from megatron.swap.engine.run_snapshot import RunSnapshot


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


def no_snapshot() -> None:
    """What a layer reads is never found to have changed."""
    LayerState.changes = lambda *_: []  # type: ignore[method-assign,assignment,return-value]
    RunSnapshot.is_unchanged = lambda *_: True  # type: ignore[method-assign,assignment,return-value]


def no_checksum() -> None:
    """Nothing that a layer computes again is compared."""
    for name in ("_compare", "_compare_results"):
        setattr(CheckedRun, name, lambda *_: None)


def checksum_of_a_part() -> None:
    """Only the first half of a tensor is compared."""
    whole = run_prints.fingerprint
    run_prints.fingerprint = lambda tensor: whole(tensor.reshape(-1)[: tensor.numel() // 2])  # type: ignore[assignment]


def checksum_without_places() -> None:
    """A sum of all bytes is compared: elements may change places."""
    whole = run_prints.fingerprint
    run_prints.fingerprint = lambda tensor: whole(tensor).sum().reshape(1)  # type: ignore[assignment]


def flags_unread() -> None:
    """Nobody reads what comparisons on the device have found."""
    RunChecks.before_step = RunChecks.read = lambda *_: None  # type: ignore[method-assign,assignment,return-value]


def never_in_turn() -> None:
    """Of what a layer saves, nothing is compared but what it saves last."""
    run = RunChecks.run

    def without_turn(self: RunChecks, *arguments: Any, **options: Any) -> Any:
        return run(self, *arguments, **{**options, "in_turn": options.get("saved")})

    RunChecks.run = without_turn  # type: ignore[method-assign,assignment]


PLANTED: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        uses_before_arrival, copies_overtake, late_writes_unseen, never_ends, no_snapshot, no_checksum,
        checksum_of_a_part, checksum_without_places, flags_unread, never_in_turn,
    )
}  # fmt: skip


def plant(name: str) -> None:
    """Plant a defect in this process.

    Raises:
        KeyError: there is none of that name.
    """
    PLANTED[name]()
