"""The content of a trace, independent of the profiler: work and copies on the device, named ranges on the host.

Times are integer nanoseconds on one clock that starts with the first range.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

NO_LAUNCH = int(np.iinfo(np.int64).min)  # Placeholder for an unknown launch time: the launch was before the capture
WITHIN_DEVICE = "DtoD"  # Copies within the device count as compute: they run between kernels on the compute stream
US = 1_000
MS = 1_000_000
TIMES = ("start_ns", "end_ns", "launch_start_ns", "launch_end_ns", "thread", "stream")
WORK = np.dtype([*((name, np.int64) for name in TIMES), ("is_comm", bool), ("is_outer", bool)])
"""Kernels, memsets and copies within the device. On a GPU the launch of an entry is the call that enqueued it, and
``thread`` made that call. In the emulation, where the host computes, entries are operators and their own launches;
nested operators are not ``is_outer``. ``is_comm``: communication between ranks, whose kernels spin while they wait."""


class TraceError(ValueError):
    """A trace cannot be analysed: wrong format, a missing table, or no step or swap range."""


@dataclass(frozen=True, slots=True)
class Range:
    name: str
    start_ns: int
    end_ns: int
    thread: int


@dataclass(frozen=True, slots=True)
class Memcpy:
    direction: str
    num_bytes: int
    start_ns: int
    end_ns: int
    stream: int
    launch_ns: int = NO_LAUNCH
    thread: int = 0

    @property
    def gb_per_s(self) -> float:
        """Return the speed in bytes per nanosecond, which is 10^9 bytes per second."""
        return self.num_bytes / max(1, self.end_ns - self.start_ns)


@dataclass(frozen=True)
class Trace:
    format: Literal["kineto", "nsys"]
    is_emulated: bool  # Whether there was no GPU: operators on the host stand for kernels, threads for copy engines
    work: np.recarray  # Records of `WORK`, sorted by start
    copies: list[Memcpy]  # Copies between device and host, or between devices
    ranges: list[Range]  # Sorted by start; of ranges with the same start the outer one is first


class Activities:
    """Collects work and copies of a GPU. ``launches``: start, end and thread of the launch call by correlation."""

    def __init__(self, launches: dict[Any, tuple[int, int, int]]) -> None:
        self._launches = launches
        self.rows: list[tuple[Any, ...]] = []
        self.copies: list[Memcpy] = []

    def add_work(self, span: tuple[int, int], stream: int, number: object, is_comm: bool = False) -> None:
        launch = self._launches.get(number, (NO_LAUNCH, NO_LAUNCH, 0))
        self.rows.append((*span, *launch, stream, is_comm, True))

    def add_copy(self, direction: str, num_bytes: int, span: tuple[int, int], stream: int, number: object) -> None:
        if direction == WITHIN_DEVICE:
            self.add_work(span, stream, number)
            return
        launch_ns, _, thread = self._launches.get(number, (NO_LAUNCH, NO_LAUNCH, 0))
        self.copies.append(Memcpy(direction, num_bytes, *span, stream, launch_ns, thread))


def work_from(rows: list[tuple[Any, ...]]) -> np.recarray:
    records = np.array(rows, WORK)
    return records[np.argsort(records["start_ns"], kind="stable")].view(np.recarray)


def in_order(ranges: list[Range]) -> list[Range]:
    return sorted(ranges, key=lambda found: (found.start_ns, -found.end_ns))
