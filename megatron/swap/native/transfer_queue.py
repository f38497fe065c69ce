"""The transfer queue: jobs of copies between host memory and CUDA devices, run by a thread in C++.

Only `TensorSwap` uses it: the engine copies by `Device.copy`.

The *core* in C++ runs the jobs and keeps states and tickets. Checks and error messages are here. Addresses, streams and
events are plain integers, as ``data_ptr()``, ``Stream.cuda_stream`` and ``Event.cuda_event`` return them. The caller
keeps their objects alive until the job is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol, cast

from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.native.build import load
from megatron.swap.native.cuda_library import loaded_cuda_library

WAKE_S = 0.1
"""Seconds after which a waiting thread returns to the interpreter, so that it handles Ctrl-C."""

MAY_BE_ZERO = {"num_bytes", "stream", "after", "device"}


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Copy ``num_bytes`` from address ``source`` to address ``target``. The two must not overlap."""

    target: int
    source: int
    num_bytes: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class CudaCopy:
    """A copy on a CUDA stream, to, from or between devices.

    Attributes:
        target: address.
        source: address. The side on the host should be pinned memory, else the worker waits for the copy.
        num_bytes: to copy.
        stream: a raw ``cudaStream_t``.
        after: a ``cudaEvent_t`` that the stream waits for before the copy; 0: none.
        done: a ``cudaEvent_t`` of ``device`` that is recorded behind the copy. It must not be recorded elsewhere before
            the job is done. torch creates an event at its first record, so record it once before reading
            ``cuda_event``.
        device: index of the device of ``stream`` and ``done``. The worker makes it current: otherwise a new thread
            creates a context on device 0, which takes memory there from another rank.
    """

    target: int
    source: int
    num_bytes: int
    stream: int
    after: int
    done: int
    device: int

    def __post_init__(self) -> None:
        _check(self)


Step = HostCopy | CudaCopy
Job = Sequence[Step]


class JobState(IntEnum):
    """State of a job; ``transfer_queue.h`` has the same numbers.

    A job passes through the first four in order. ``DONE`` and those below it are final.
    """

    WAITING = 0
    RUNNING = 1
    ISSUED = 2
    """The job's host copies are complete, and its CUDA copies are enqueued."""
    DONE = 3
    FAILED = 4
    WITHDRAWN = 5
    UNKNOWN = 6


class Core(Protocol):
    """The core in ``transfer_queue.h``. Any thread may call it. Tickets begin with 1; 0 means none."""

    def start(self) -> None: ...
    def is_started(self) -> bool: ...
    def add(self, job: Job, at_head: bool) -> int:
        """Return the job's ticket; 0: the queue is closed."""

    def erase(self, ticket: int) -> bool: ...
    def dequeue(self) -> int: ...
    def state(self, ticket: int) -> int: ...
    def wait(self, ticket: int, until: int, seconds: float) -> int:
        """Wait until the job's state is ``until`` or above, or ``seconds`` have passed. Return the state."""

    def wait_all(self, seconds: float) -> bool: ...
    def failure(self, ticket: int) -> str:
        """Return the text of a failed job's error. It counts as raised from now on."""

    def first_failure(self) -> int:
        """Return the lowest ticket of a failure that was not raised; 0: there is none."""

    def close(self) -> None:
        """Accept no more jobs; the worker ends after the last one."""

    def join(self) -> None: ...
    def abandon(self) -> None:
        """Close, withdraw the jobs that have not begun, and join. Also called at the interpreter's exit."""

    def num_waiting(self) -> int: ...
    def num_under_way(self) -> int: ...


class _Native(Protocol):
    def Core(self, name: str, num_in_flight: int, cuda_library: str | None) -> Core: ...


class TransferQueue:
    """A queue of jobs that a C++ thread of its own, which never waits for the interpreter, runs one after the other.

    A *job* is a sequence of steps, run in order: a step after a CUDA copy begins only when that copy is complete;
    consecutive copies are ordered on the device instead. Jobs begin in the order of the queue. A job begins while CUDA
    copies at the end of earlier ones are still under way, of ``num_in_flight`` jobs at most; so a pushed job waits for
    few copies.

    A job that fails skips its remaining steps; later jobs go on. Waiting for the job raises the error.

    The queue keeps the failures of jobs and the tickets of withdrawn ones, and nothing of jobs that succeeded.

    Every method may be called from any thread. Waiting lets other threads run, and Ctrl-C interrupts it. When the queue
    is finalized, or the interpreter exits, jobs under way are finished and the others withdrawn.

    Args:
        name: of the thread, for profilers, and in errors.
        num_in_flight: at least 1.
        cuda_library: path of the CUDA runtime; ``None``: the loaded one, if any (torch loads it).

    Raises:
        UsageError: ``num_in_flight`` is below 1.
        SwapError: the C++ part cannot be built here, or is not wanted.
    """

    def __init__(self, name: str, num_in_flight: int = 2, cuda_library: str | None = None) -> None:
        if num_in_flight < 1:
            raise UsageError(f"transfer queue {name}: num_in_flight={num_in_flight}; it is at least 1")
        native = load()
        if native is None:
            raise SwapError(f"transfer queue {name}: it needs the C++ part of this package, which is not here")
        self.name = name
        self._core = cast(_Native, native).Core(name, num_in_flight, cuda_library or loaded_cuda_library())
        weakref.finalize(self, self._core.abandon)  # at exit too, before the interpreter is finalized

    def start(self) -> None:
        """Begin to run jobs; before that they only queue up. A second call does nothing."""
        self._core.start()

    def enqueue(self, job: Job) -> int:
        """Add a job behind all others, and return its ticket.

        Raises:
            UsageError: the queue was stopped.
        """
        return self._add(job, at_head=False)

    def push(self, job: Job) -> int:
        """Add a job ahead of all jobs that have not begun; else as ``enqueue``."""
        return self._add(job, at_head=True)

    def erase(self, ticket: int) -> bool:
        """Withdraw a job. Return whether it is withdrawn; False: it has begun, or is over."""
        if self._core.state(ticket) == JobState.UNKNOWN:
            raise self._unknown(ticket)
        return self._core.erase(ticket)

    def dequeue(self) -> int | None:
        """Withdraw the first job that has not begun, and return its ticket; ``None``: there is none."""
        return self._core.dequeue() or None

    def is_done(self, ticket: int) -> bool:
        """Whether the job is over, complete or failed, and no longer uses its memory.

        Raises:
            UsageError: the job was withdrawn, or the ticket is not of this queue.
        """
        return self._checked(ticket, self._core.state(ticket)) in (JobState.DONE, JobState.FAILED)

    def wait_issued(self, ticket: int) -> None:
        """Wait until all steps of the job are issued, so that another stream can wait for its ``done`` events.

        Its host copies are complete then, and its CUDA copies are enqueued and their ``done`` recorded.

        Raises:
            UsageError: the job was withdrawn, the ticket is not of this queue, or the queue was not started.
            SwapError: the job failed.
        """
        self._wait(ticket, JobState.ISSUED)

    def wait(self, ticket: int) -> None:
        """Wait until the job is complete. Raises what ``wait_issued`` raises."""
        self._wait(ticket, JobState.DONE)

    def wait_all(self) -> None:
        """Wait until no job waits or is under way, including jobs that other threads add meanwhile.

        Raises:
            UsageError: jobs wait, and the queue was not started.
            SwapError: the error of the failed job with the lowest ticket that was not raised yet. Further
                calls raise the others.
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
        """Accept no more jobs, finish the queued ones, and end the thread. A second call does nothing.

        Raises:
            As ``wait_all``. The queue is stopped then, unless it was never started.
        """
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
        return self._core.num_waiting()

    @property
    def num_under_way(self) -> int:
        """Number of jobs that have begun and are not complete."""
        return self._core.num_under_way()

    def _add(self, job: Job, at_head: bool) -> int:
        ticket = self._core.add(job, at_head)
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


def _check(step: Step) -> None:
    """Check a step when it is created: a wrong address would crash the worker."""
    for field in fields(step):
        value = getattr(step, field.name)
        least = 0 if field.name in MAY_BE_ZERO else 1
        if not isinstance(value, int) or value < least:
            raise UsageError(f"{type(step).__name__}: {field.name}={value!r}; it is an integer and at least {least}")
