"""What a trace holds, whichever profiler wrote it: work and copies on the device, named ranges on the host.

Times are nanoseconds (int) on one clock that starts with the first range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

NO_LAUNCH = int(np.iinfo(np.int64).min)
"""In place of a launch time: it was launched before the capture, and the trace does not say by whom."""

WITHIN_DEVICE = "DtoD"
"""Copies in this direction are compute: they run between kernels, on their stream."""

US = 1_000
MS = 1_000_000


class TraceError(ValueError):
    """A file that cannot be judged: another format, a table missing, no step or no swap range in it."""


@dataclass(frozen=True, slots=True)
class Range:
    """A named stretch of host time on one thread."""

    name: str
    start_ns: int
    end_ns: int
    thread: int


@dataclass(frozen=True, slots=True)
class Memcpy:
    """One copy that ran on the device. ``direction`` as CUDA names it: DtoH, HtoD, …"""

    direction: str
    num_bytes: int
    start_ns: int
    end_ns: int
    stream: int
    launch_ns: int = NO_LAUNCH
    thread: int = 0

    @property
    def gb_per_s(self) -> float:
        """Bytes a nanosecond, which is 10^9 bytes a second."""
        return self.num_bytes / max(1, self.end_ns - self.start_ns)


WORK_COLUMNS = ("start_ns", "end_ns", "launch_start_ns", "launch_end_ns", "thread", "stream", "is_comm", "is_outer")


@dataclass(frozen=True)
class Work:
    """Kernels, memsets and copies within the device, in order of their start: columns of one length.

    On a GPU an entry's launch is the call that enqueued it, and ``thread`` made that call. In the emulation, where
    the host computes, entries are operators, each its own launch; those inside others are not ``is_outer``.
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
    """``rows``: tuples in the order of ``WORK_COLUMNS``."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(WORK_COLUMNS))
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    plain, flags = columns.T[:6], columns.T[6:].astype(bool)
    return Work(*plain, *flags)


@dataclass(frozen=True)
class Trace:
    """One rank's trace of a few training steps."""

    format: Literal["kineto", "nsys"]
    is_emulated: bool
    """No GPU: operators on the host stand for kernels, threads for copy engines."""
    work: Work
    copies: list[Memcpy]
    """Those between device and host, or between devices."""
    ranges: list[Range]
    """In order of their start; of two that start together the outer one first."""


def in_order(ranges: list[Range]) -> list[Range]:
    return sorted(ranges, key=lambda found: (found.start_ns, -found.end_ns))
