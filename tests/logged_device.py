"""A lazy device that logs its work, and the goldens of these logs: copies, waits and lifetimes, in their order.

Events have the name of the place where they were recorded, so that one more event that nobody waits for changes no log.
"""

import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.native.guarding import Flag, GuardCore, native, new_guard
from tests.lazy_device import LazyDevice, LazyEvent, LazyStream

GOLDENS = Path(__file__).with_name("goldens") / "orders.json"


class LoggedDevice(LazyDevice):
    """A lazy device whose work is in ``log``: one line for each copy, wait, allocation and release.

    Work of the threads of a disk is not: only how much it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self._main = threading.get_ident()
        self._flags: list[Flag] = []
        self._num_elsewhere: Counter[str] = Counter()
        self._places: dict[LazyEvent, str] = {}
        self._num_copies_of: Counter[str] = Counter()

    def _add(self, line: str) -> None:
        if threading.get_ident() == self._main:
            self.log.append(line)
        else:
            self._num_elsewhere[line.split("@")[0]] += 1

    def whole_log(self) -> list[str]:
        """Return the log, with what other threads did at its end."""
        return [*self.log, *(f"{number} x {line}" for line, number in sorted(self._num_elsewhere.items()))]

    @contextlib.contextmanager
    def line(self, name: str) -> Iterator[None]:
        self._add(name)
        yield

    def record(self, stream: LazyStream) -> LazyEvent:
        event = super().record(stream)
        place = len(self.log) if stream is self.compute else self._num_copies_of[stream.name]
        self._places[event] = f"{stream.name}@{place}"
        return event

    def wait(self, stream: LazyStream, event: LazyEvent) -> None:
        self._add(f"{stream.name} waits for {self._places[event]}")
        super().wait(stream, event)

    def finish(self, event: LazyEvent) -> None:
        self._add(f"the host waits for {self._places[event]}")
        super().finish(event)

    def copy(self, stream: LazyStream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        self._num_copies_of[stream.name] += 1
        self._add(f"{stream.name} copies {[source.numel() for source in sources]}")
        return super().copy(stream, targets, sources)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._add(f"{num_bytes} bytes are taken")
        return super().allocate(num_bytes)

    def discard(self, storage: torch.UntypedStorage) -> None:
        self._add(f"{storage.nbytes()} bytes are given up")
        super().discard(storage)

    def used_on(self, storage: torch.UntypedStorage, stream: LazyStream) -> None:
        self._add(f"{stream.name} uses {storage.nbytes()} bytes")

    def synchronize(self) -> None:
        self._add("the host waits for all")
        super().synchronize()

    def make_guard(self) -> GuardCore:
        self.guard = new_guard()
        return self.guard

    def native_event(self, event: LazyEvent) -> int:
        flag = native().Flag()
        flag.raise_()  # a guard that evicts would wait for it
        self._flags.append(flag)
        return flag.address


def logged(ranges: Ranges | None = None) -> LoggedDevice:
    device = LoggedDevice()
    if ranges is not None:
        ranges.start(device.line)
    return device


def digest(log: Sequence[str]) -> dict[str, Any]:
    return {"lines": len(log), "sha256": hashlib.sha256("\n".join(log).encode()).hexdigest()}


def goldens() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDENS.read_text())
    return found


def write(digests: dict[str, Any]) -> None:
    """Replace those of ``digests`` in ``GOLDENS``: a conscious act."""
    known = goldens() if GOLDENS.exists() else {}
    GOLDENS.write_text(json.dumps(known | digests, indent=1, sort_keys=True) + "\n")
