"""The content of a trace, independent of the profiler: work and copies on the device, named ranges on the host.

Times are integer nanoseconds on one clock that starts with the first range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

NO_LAUNCH = int(np.iinfo(np.int64).min)
"""Placeholder for an unknown launch time: the launch was before the capture."""

WITHIN_DEVICE = "DtoD"
"""Copies within the device count as compute: they run between kernels on the compute stream."""

US = 1_000
MS = 1_000_000


class TraceError(ValueError):
    """A trace cannot be analysed: wrong format, a missing table, or no step or swap range."""


@dataclass(frozen=True, slots=True)
class Range:
    """A named stretch of host time on one thread."""

    name: str
    start_ns: int
    end_ns: int
    thread: int


@dataclass(frozen=True, slots=True)
class Memcpy:
    """One copy that ran on the device. ``direction``: CUDA's name, such as DtoH or HtoD."""

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


WORK_COLUMNS = ("start_ns", "end_ns", "launch_start_ns", "launch_end_ns", "thread", "stream", "is_comm", "is_outer")


@dataclass(frozen=True)
class Work:
    """Kernels, memsets and copies within the device, sorted by start; all columns have the same length.

    On a GPU the launch of an entry is the call that enqueued it, and ``thread`` made that call. In the emulation, where
    the host computes, entries are operators and their own launches; nested operators are not ``is_outer``.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    launch_start_ns: np.ndarray
    launch_end_ns: np.ndarray
    thread: np.ndarray
    stream: np.ndarray
    is_comm: np.ndarray
    """Communication between ranks: such kernels spin while they wait."""
    is_outer: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    def where(self, mask: np.ndarray) -> Work:
        return Work(*(getattr(self, name)[mask] for name in WORK_COLUMNS))


def work_from(rows: list[tuple]) -> Work:
    """Build the columns from tuples in the order of ``WORK_COLUMNS``."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(WORK_COLUMNS))
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    plain, flags = columns.T[:6], columns.T[6:].astype(bool)
    return Work(*plain, *flags)


@dataclass(frozen=True)
class Trace:
    """One rank's trace of a few training steps."""

    format: Literal["kineto", "nsys"]
    is_emulated: bool
    """Whether there was no GPU: operators on the host stand for kernels, threads for copy engines."""
    work: Work
    copies: list[Memcpy]
    """Copies between device and host, or between devices."""
    ranges: list[Range]
    """Sorted by start; of ranges with the same start the outer one is first."""


def in_order(ranges: list[Range]) -> list[Range]:
    return sorted(ranges, key=lambda found: (found.start_ns, -found.end_ns))
