"""The transfer queue: jobs of copies between host memory and CUDA devices, run by a thread in C++.

Only `TensorSwap` uses it: the engine copies by `Device.copy`. The *core* in C++ runs the jobs and keeps states and
tickets. This module checks, and makes the errors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.native.build import load
from megatron.swap.native.cuda_library import loaded_cuda_library

WAKE_S = 0.1  # a waiting thread returns to the interpreter after these seconds, so that it handles Ctrl-C


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Copy between two ranges of host memory that do not overlap."""

    target: int  # address; the caller keeps the memory of both until the job is done
    source: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """A copy on a CUDA stream, to, from or between devices. The caller keeps all its objects until the job is done."""

    target: int  # address
    source: int  # address; the worker waits for the copy unless the side on the host is pinned
    num_bytes: int
    stream: int  # cudaStream_t, from Stream.cuda_stream
    after: int  # cudaEvent_t that the stream waits for before the copy; 0 for none
    # cudaEvent_t of `device`, recorded behind the copy. Nothing may record it elsewhere before the job is done. torch
    # creates an event at its first record, so record it once before reading Event.cuda_event.
    done: int
    # Index of the device of `stream` and `done`. The worker makes it current. A new thread would create a context on
    # device 0, which takes memory there from another rank.
    device: int


Step = HostCopy | CudaCopy
Job = Sequence[Step]


class JobState(IntEnum):
    """State of a job, numbered as in ``transfer_queue.h``: four in order, of which ``DONE`` and all below are final."""

    WAITING = 0
    RUNNING = 1
    ISSUED = 2  # host copies are complete, and CUDA copies are enqueued
    DONE = 3
    FAILED = 4
    WITHDRAWN = 5
    UNKNOWN = 6


class TransferQueue:
    """A queue of jobs that a C++ thread of its own runs. The thread never waits for the interpreter.

    A *job* is a sequence of steps, run in order. Jobs begin in the order of the queue, while CUDA copies at the end of
    up to ``num_in_flight`` earlier jobs are under way. So a pushed job waits for few copies. A job that fails skips its
    remaining steps; later jobs go on. Waiting for the job raises the error.

    Any thread may call any method. Waiting lets other threads run, and Ctrl-C interrupts it. When the queue is
    finalized, or the interpreter exits, jobs under way are finished and all others withdrawn.

    ``name`` is the thread's, ``cuda_library`` the path of the CUDA runtime; by default the loaded runtime, if any.
    Raises a ``UsageError`` if ``num_in_flight`` is below 1, and a ``SwapError`` without the C++ part.
    """

    def __init__(self, name: str, num_in_flight: int = 2, cuda_library: str | None = None) -> None:
        if num_in_flight < 1:
            raise UsageError(f"transfer queue {name}: num_in_flight={num_in_flight}; it is at least 1")
        native = load()
        if native is None:
            raise SwapError(f"transfer queue {name}: it needs the C++ part of this package, which is not here")
        self.name = name
        # Its methods are described in transfer_queue.h. Any thread may call them. Tickets begin with 1; 0 is no ticket.
        self._core = native.Core(name, num_in_flight, cuda_library or loaded_cuda_library())
        weakref.finalize(self, self._core.abandon)  # at exit too, before the interpreter is finalized

    def start(self) -> None:
        """Begin to run jobs. A second call does nothing."""
        self._core.start()

    def enqueue(self, job: Job) -> int:
        """Add a job behind all others, and return its ticket. Raises a ``UsageError`` if the queue was stopped."""
        return self._add(job, at_head=False)

    def push(self, job: Job) -> int:
        """Add a job ahead of all jobs that have not begun; otherwise as ``enqueue``."""
        return self._add(job, at_head=True)

    def erase(self, ticket: int) -> bool:
        """Withdraw a job, and return whether it is withdrawn. False if it has begun, or is over."""
        if self._core.state(ticket) == JobState.UNKNOWN:
            raise self._unknown(ticket)
        return bool(self._core.erase(ticket))

    def is_done(self, ticket: int) -> bool:
        """Whether the job is over, complete or failed. Raises a ``UsageError`` if it was withdrawn or is unknown."""
        return self._checked(ticket, self._core.state(ticket)) in (JobState.DONE, JobState.FAILED)

    def wait_issued(self, ticket: int) -> None:
        """Wait until the job's host copies are complete, and its CUDA copies enqueued and their ``done`` recorded.

        Raises a ``SwapError`` if the job failed, and a ``UsageError`` if it will never begin or is unknown.
        """
        self._wait(ticket, JobState.ISSUED)

    def wait(self, ticket: int) -> None:
        """Wait until the job is complete. Raises as ``wait_issued``."""
        self._wait(ticket, JobState.DONE)

    def wait_all(self) -> None:
        """Wait until no job waits or is under way, jobs included that other threads add meanwhile.

        Raises the first failed job's error that was not raised yet, or a ``UsageError`` if the queue was not started.
        """
        while not self._core.wait_all(0):
            if self._core.num_waiting() and not self._core.is_started():
                raise UsageError(
                    f"transfer queue {self.name}: {self._core.num_waiting()} jobs wait for ever, since it was not "
                    "started: call start(), or erase() them"
                )
            self._core.wait_all(WAKE_S)
        if failed := self._core.first_failure():
            raise self._failure(failed)

    def wait_and_stop(self) -> None:
        """Accept no more jobs, finish the queued ones, and end the thread if it was started. Raises as ``wait_all``."""
        if self._core.is_started() or not self._core.num_waiting():
            self._core.close()
        try:
            self.wait_all()
        finally:
            if self._core.wait_all(0):
                self._core.join()

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return int(self._core.num_waiting())

    def _add(self, job: Job, at_head: bool) -> int:
        ticket: int = self._core.add(job, at_head)
        if not ticket:
            raise UsageError(f"transfer queue {self.name}: it was stopped and takes no more jobs")
        return ticket

    def _wait(self, ticket: int, until: JobState) -> None:
        seconds = 0.0
        while (state := self._checked(ticket, self._core.wait(ticket, until, seconds))) < until:
            if state == JobState.WAITING and not self._core.is_started():
                raise UsageError(
                    f"transfer queue {self.name}: job {ticket} waits for ever, since it was not started: call start()"
                )
            seconds = WAKE_S
        if state == JobState.FAILED:
            raise self._failure(ticket)

    def _checked(self, ticket: int, state: int) -> JobState:
        if state == JobState.UNKNOWN:
            raise self._unknown(ticket)
        if state == JobState.WITHDRAWN:
            raise UsageError(f"transfer queue {self.name}: job {ticket} was withdrawn before it began")
        return JobState(state)

    def _unknown(self, ticket: int) -> UsageError:
        return UsageError(f"transfer queue {self.name}: {ticket} is no ticket of this queue: enqueue() returns them")

    def _failure(self, ticket: int) -> SwapError:
        return SwapError(f"transfer queue {self.name}, job {ticket}: {self._core.failure(ticket)}")
