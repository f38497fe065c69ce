"""The contract of transfer queues: jobs of steps between host memory, files and CUDA devices, done by one thread.

Both implementations have a *core*, which does the work and knows states and tickets. Checks and error messages are
here, once for both. Addresses, streams, events and descriptors are plain integers, as ``data_ptr()``,
``Stream.cuda_stream``, ``Event.cuda_event`` and ``fileno()`` return them: the caller keeps what they stand for alive
until the job is done.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Protocol

from megatron.swap.common.types import SwapError, UsageError
from megatron.swap.native.cuda_library import loaded_cuda_library

WAKE_S = 0.1
"""How often a waiting thread returns to the interpreter, which then handles Ctrl-C."""

MAY_BE_ZERO = {"num_bytes", "stream", "after", "device", "file", "offset"}


@dataclass(frozen=True, slots=True)
class HostCopy:
    """``num_bytes`` from address ``source`` to address ``target``, which do not overlap."""

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
        source: address. On the host's side pinned memory, else the worker waits for the copy.
        num_bytes: to copy.
        stream: a raw ``cudaStream_t``.
        after: a ``cudaEvent_t`` that the stream waits for before the copy; 0: none.
        done: a ``cudaEvent_t`` of ``device`` that is recorded behind the copy; nobody else records it before the job is
            done. torch makes an event when it is first recorded, so record it once before asking for ``cuda_event``.
        device: index of the device that ``stream`` and ``done`` belong to. The worker makes it current: a new thread
            would make a context on device 0, which takes memory there from another rank.
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


@dataclass(frozen=True, slots=True)
class FileRead:
    """Read ``num_bytes`` of the open ``file`` from byte ``offset`` on; fewer are an error.

    The caller keeps the rules of direct I/O: whole blocks.
    """

    file: int
    offset: int
    target: int
    num_bytes: int

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, slots=True)
class FileWrite:
    """Write ``num_bytes`` to the open ``file`` from byte ``offset`` on, as ``FileRead``."""

    file: int
    offset: int
    source: int
    num_bytes: int

    def __post_init__(self) -> None:
        _check(self)


Step = HostCopy | CudaCopy | FileRead | FileWrite
Job = Sequence[Step]


class JobState(IntEnum):
    """How far a job is; ``transfer_queue.h`` has the same numbers.

    The first four follow each other. ``DONE`` and the others are final.
    """

    WAITING = 0
    RUNNING = 1
    ISSUED = 2
    """Its host and file steps are complete; a CUDA copy at its end is not."""
    DONE = 3
    FAILED = 4
    WITHDRAWN = 5
    UNKNOWN = 6


class Core(Protocol):
    """What an implementation does. All of it may be called from any thread. Tickets begin with 1, 0 is none."""

    def start(self) -> None: ...
    def is_started(self) -> bool: ...
    def add(self, job: Job, at_head: bool) -> int:
        """The job's ticket; 0 when the queue takes no more."""

    def erase(self, ticket: int) -> bool: ...
    def dequeue(self) -> int: ...
    def state(self, ticket: int) -> int: ...
    def wait(self, ticket: int, until: int, seconds: float) -> int:
        """Wait until the job's state is ``until`` or beyond, or so much time has passed; returns the state."""

    def wait_all(self, seconds: float) -> bool: ...
    def failure(self, ticket: int) -> tuple[int, str]:
        """``errno`` (0: no file's) and text of a job that failed; from now on it counts as raised."""

    def first_failure(self) -> int:
        """The lowest ticket of a failure that has not been raised."""

    def close(self) -> None:
        """Take no more jobs; the worker ends behind the last one."""

    def join(self) -> None: ...
    def abandon(self) -> None:
        """Close, withdraw what has not begun, and join. Also called at the interpreter's exit."""

    def num_waiting(self) -> int: ...
    def num_under_way(self) -> int: ...


class TransferQueue(ABC):
    """Jobs, done one after the other by a thread of its own; from the outside nothing but memory and files changes.

    A *job* is a sequence of steps, done in order: a step behind a CUDA copy begins only when that copy is complete
    (copy behind copy the device sees to). Jobs begin in the order of the queue. CUDA copies at a job's end are still
    under way when the next begins, of ``num_in_flight`` jobs at most, so that ``push`` gets ahead of all others.

    A job that fails leaves out its other steps; later jobs go on. The error is raised at whoever waits for it:
    ``OSError`` with ``errno`` for files, ``SwapError`` (a ``RuntimeError``) for CUDA.

    Of a job that is over the queue keeps nothing unless it has failed; of one that was withdrawn it keeps the number.

    Every method may be called from any thread. Waiting lets other threads run, and Ctrl-C interrupts it. When the queue
    is finalized, or the interpreter ends, jobs under way are finished and the others dropped.

    Args:
        name: of the thread, for profilers, and in errors.
        num_in_flight: at least 1.
        cuda_library: the CUDA runtime; ``None``: the one that is loaded, if any (torch loads it).

    Raises:
        UsageError: ``num_in_flight`` is below 1.
    """

    def __init__(self, name: str, num_in_flight: int = 2, cuda_library: str | None = None) -> None:
        if num_in_flight < 1:
            raise UsageError(f"transfer queue {name}: num_in_flight={num_in_flight}; it is at least 1")
        self.name = name
        self._core = self._make_core(name, num_in_flight, cuda_library or loaded_cuda_library())
        weakref.finalize(self, self._core.abandon)  # at exit too, while the interpreter still stands

    @abstractmethod
    def _make_core(self, name: str, num_in_flight: int, cuda_library: str | None) -> Core: ...

    def start(self) -> None:
        """Begin to work; until then jobs only gather. A second call does nothing."""
        self._core.start()

    def enqueue(self, job: Job) -> int:
        """Add a job behind all others; returns its ticket.

        Raises:
            UsageError: the queue was stopped.
        """
        return self._add(job, at_head=False)

    def push(self, job: Job) -> int:
        """Add a job ahead of all that have not begun; else as ``enqueue``."""
        return self._add(job, at_head=True)

    def erase(self, ticket: int) -> bool:
        """Withdraw a job. True: it had not begun and never will; False: it has begun, or is over."""
        if self._core.state(ticket) == JobState.UNKNOWN:
            raise self._unknown(ticket)
        return self._core.erase(ticket)

    def dequeue(self) -> int | None:
        """Withdraw the first job that has not begun; returns its ticket, ``None`` where there is none."""
        return self._core.dequeue() or None

    def is_done(self, ticket: int) -> bool:
        """Whether nothing more happens to the job's memory: it is complete, or has failed.

        Raises:
            UsageError: the job was withdrawn, or is none of this queue's.
        """
        return self._checked(ticket, self._core.state(ticket)) in (JobState.DONE, JobState.FAILED)

    def wait_issued(self, ticket: int) -> None:
        """Wait until all steps of the job are issued: those of host and files are complete, CUDA copies are on their
        streams and ``done`` recorded, so that another stream can wait for it.

        Raises:
            UsageError: the job was withdrawn, is none of this queue's, or waits and nobody has started the queue.
            OSError, SwapError: the job failed.
        """
        self._wait(ticket, JobState.ISSUED)

    def wait(self, ticket: int) -> None:
        """Wait until the job is complete. Raises what ``wait_issued`` raises."""
        self._wait(ticket, JobState.DONE)

    def wait_all(self) -> None:
        """Wait until nothing waits and nothing is under way, including what others add meanwhile.

        Raises:
            UsageError: jobs wait, and nobody has started the queue.
            OSError, SwapError: a job has failed whose error was not raised yet; the lowest ticket first. Further calls
                raise the others.
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
        """Take no more jobs, finish those that are there, and end the thread. A second call does nothing more.

        Raises:
            What ``wait_all`` raises; the queue is stopped then, but for one that was never started.
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
        """Jobs that have not begun."""
        return self._core.num_waiting()

    @property
    def num_under_way(self) -> int:
        """Jobs that have begun and are not complete."""
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

    def _failure(self, ticket: int) -> OSError | SwapError:
        number, text = self._core.failure(ticket)
        text = f"transfer queue {self.name}, job {ticket}: {text}"
        return OSError(number, text) if number else SwapError(text)


def _check(step: Step) -> None:
    """Check a step where it is made: in the worker a wrong address would end the process."""
    for field in fields(step):
        value = getattr(step, field.name)
        least = 0 if field.name in MAY_BE_ZERO else 1
        if not isinstance(value, int) or value < least:
            raise UsageError(f"{type(step).__name__}: {field.name}={value!r}; it is an integer and at least {least}")
