"""The Python fallback of the transfer queue, for machines without a compiler.

Copies run without the GIL, but each begins and ends with it. A busy interpreter delays this thread,
which is why there is a native one.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from megatron.swap.common.types import MIB
from megatron.swap.native.base import Core, CudaCopy, HostCopy, Job, JobState, Step, TransferQueue

POLL_S = 0.0005
"""Seconds between queries of the events of copies in flight."""
CHUNK_BYTES = 8 * MIB
"""Bytes of a host copy that are moved at once. In between the worker queries the copies in flight."""

COPY_DEFAULT = 4
"""``cudaMemcpyDefault``: the runtime tells host from device by the addresses."""
SUCCESS = 0
NOT_READY = 600


@dataclass(slots=True)
class Flight:
    """A job, and its last CUDA copy that was issued."""

    ticket: int
    event: int = 0
    """``done`` of that copy; 0: there is none, or it has passed."""
    stream: int = 0
    device: int = 0
    failure: str | None = None


class StepFailed(Exception):
    """A step failed."""


class CudaRuntime:
    """The CUDA runtime in ``library``. Its methods raise ``StepFailed`` if CUDA fails."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self._library.cudaMemcpyAsync.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
        )
        self._library.cudaStreamWaitEvent.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
        self._library.cudaStreamSynchronize.argtypes = (ctypes.c_void_p,)
        self._library.cudaEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._library.cudaEventQuery.argtypes = (ctypes.c_void_p,)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._device = -1

    def use_device(self, device: int) -> None:
        """Make ``device`` current. A new thread's device is 0, and a context there takes memory from another rank."""
        if device != self._device:
            self._check(self._library.cudaSetDevice(device), "choosing a device")
            self._device = device

    def wait_event(self, stream: int, event: int) -> None:
        self._check(self._library.cudaStreamWaitEvent(stream, event, 0), "waiting for an event")

    def copy(self, step: CudaCopy) -> None:
        library = self._library
        code = library.cudaMemcpyAsync(step.target, step.source, step.num_bytes, COPY_DEFAULT, step.stream)
        self._check(code, "copying")

    def record(self, event: int, stream: int) -> None:
        code = self._library.cudaEventRecord(event, stream)
        if code != SUCCESS:
            # Without the event nothing shows when the copy is over, and the job's memory must not be released before.
            self._library.cudaStreamSynchronize(stream)
            self._check(code, "recording an event")

    def has_passed(self, event: int) -> bool:
        code = self._library.cudaEventQuery(event)
        if code == NOT_READY:
            return False
        self._check(code, "a copy")
        return True

    def _check(self, code: int, what: str) -> None:
        if code != SUCCESS:
            raise StepFailed(f"CUDA: {what} failed: {self._library.cudaGetErrorString(code).decode()}")


class PythonCore:
    """The ``Core`` in Python. ``_changed`` guards all shared state; only the worker changes ``_in_flight``."""

    def __init__(self, name: str, num_in_flight: int, cuda_library: str | None) -> None:
        self._name = name
        self._num_in_flight = num_in_flight
        self._cuda = CudaRuntime(cuda_library) if cuda_library else None
        self._changed = threading.Condition()
        self._waiting: OrderedDict[int, tuple[Step, ...]] = OrderedDict()
        self._running = 0
        self._in_flight: dict[int, Flight] = {}
        self._failures: dict[int, str] = {}
        self._unraised: set[int] = set()
        self._withdrawn: set[int] = set()
        self._last = 0
        self._is_closed = False
        self._is_abandoned = False
        self._worker: threading.Thread | None = None

    # ----------------------------------------------------------------------------------------- the callers' side

    def start(self) -> None:
        with self._changed:
            if self._worker is None and not self._is_closed:
                # A daemon: the interpreter joins other threads before it runs the finalizer that ends this one.
                self._worker = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._worker.start()

    def is_started(self) -> bool:
        return self._worker is not None

    def add(self, job: Job, at_head: bool) -> int:
        steps = tuple(job)
        for step in steps:
            if not isinstance(step, Step):
                raise TypeError(f"not a step: {type(step).__name__}")
        with self._changed:
            if self._is_closed:
                return 0
            self._last += 1
            self._waiting[self._last] = steps
            self._waiting.move_to_end(self._last, last=not at_head)
            self._changed.notify_all()
            return self._last

    def erase(self, ticket: int) -> bool:
        with self._changed:
            if ticket not in self._waiting:
                return ticket in self._withdrawn
            self._withdraw(ticket)
            return True

    def dequeue(self) -> int:
        with self._changed:
            ticket = next(iter(self._waiting), 0)
            if ticket:
                self._withdraw(ticket)
            return ticket

    def state(self, ticket: int) -> int:
        with self._changed:
            return self._state(ticket)

    def wait(self, ticket: int, until: int, seconds: float) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._state(ticket) >= until, seconds)
            return self._state(ticket)

    def wait_all(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._waiting or self._in_flight or self._running), seconds
            )

    def failure(self, ticket: int) -> str:
        with self._changed:
            self._unraised.discard(ticket)
            return self._failures[ticket]

    def first_failure(self) -> int:
        with self._changed:
            return min(self._unraised, default=0)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def join(self) -> None:
        # Garbage collection may finalize the queue on the worker itself.
        if self._worker is not None and self._worker is not threading.current_thread():
            self._worker.join()

    def abandon(self) -> None:
        with self._changed:
            # A finalizer may run inside any of these methods, on the thread that holds the lock: only set flags.
            self._is_closed = self._is_abandoned = True
            self._changed.notify_all()
        self.join()

    def num_waiting(self) -> int:
        with self._changed:
            return len(self._waiting)

    def num_under_way(self) -> int:
        with self._changed:
            return len(self._in_flight) + (self._running != 0)

    def _state(self, ticket: int) -> JobState:
        if not 1 <= ticket <= self._last:
            return JobState.UNKNOWN
        if ticket == self._running:
            return JobState.RUNNING
        if ticket in self._waiting:
            return JobState.WAITING
        if flight := self._in_flight.get(ticket):
            # A failure is reported only when the job's memory is no longer in use.
            return JobState.RUNNING if flight.failure else JobState.ISSUED
        if ticket in self._failures:
            return JobState.FAILED
        return JobState.WITHDRAWN if ticket in self._withdrawn else JobState.DONE

    def _withdraw(self, ticket: int) -> None:
        del self._waiting[ticket]
        self._withdrawn.add(ticket)
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------------ the worker

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._is_abandoned and self._waiting:
                    self._withdraw(next(iter(self._waiting)))
                if self._is_closed and not self._waiting and not self._in_flight:
                    return
                job = self._begin()
                if job is None:
                    # A copy in flight may hold back the first waiting job. A job pushed ahead of it wakes us.
                    self._changed.wait(POLL_S if self._in_flight else None)
            if job is not None:
                flight = self._issue(self._running, job)
                with self._changed:
                    self._running = 0
                    if flight.event:
                        self._in_flight[flight.ticket] = flight
                    else:
                        self._end(flight)
                    self._changed.notify_all()
                del job, flight  # keep nothing of the job alive while this thread waits
            self._reap()

    def _begin(self) -> tuple[Step, ...] | None:
        if not self._waiting:
            return None
        ticket, job = next(iter(self._waiting.items()))
        if len(self._in_flight) >= self._num_in_flight and any(isinstance(step, CudaCopy) for step in job):
            return None
        del self._waiting[ticket]
        self._running = ticket
        return job

    def _end(self, flight: Flight) -> None:
        if flight.failure:
            self._failures[flight.ticket] = flight.failure
            self._unraised.add(flight.ticket)

    def _issue(self, ticket: int, job: Job) -> Flight:
        flight = Flight(ticket)
        try:
            for step in job:
                if isinstance(step, CudaCopy):
                    self._cuda_copy(step, flight)
                    continue
                self._wait_for_copy(flight)
                self._host_copy(step)
        except StepFailed as failed:
            flight.failure = str(failed)  # a copy that was issued before is still waited for
        except Exception as error:  # the thread goes on with the other jobs
            flight.failure = f"{type(error).__name__}: {error}"
        return flight

    def _host_copy(self, step: HostCopy) -> None:
        for moved in range(0, step.num_bytes, CHUNK_BYTES):
            ctypes.memmove(step.target + moved, step.source + moved, min(CHUNK_BYTES, step.num_bytes - moved))
            self._reap()

    def _cuda_copy(self, step: CudaCopy, flight: Flight) -> None:
        cuda = self._cuda
        if cuda is None:
            raise StepFailed("no CUDA runtime is loaded in this process")
        cuda.use_device(step.device)
        # This copy follows the job's previous copy by stream order, or by an event; the thread does not wait.
        if flight.event and (flight.stream, flight.device) != (step.stream, step.device):
            cuda.wait_event(step.stream, flight.event)
        if step.after:
            cuda.wait_event(step.stream, step.after)
        cuda.copy(step)
        flight.event = 0  # if recording fails, ``record`` has waited for all of the stream
        cuda.record(step.done, step.stream)
        flight.event, flight.stream, flight.device = step.done, step.stream, step.device

    def _reap(self) -> None:
        """End the copies in flight that are complete. Queries run without our lock: they may wait for one of CUDA's."""
        complete = [flight for flight in self._in_flight.values() if self._is_complete(flight)]
        if complete:
            with self._changed:
                for flight in complete:
                    del self._in_flight[flight.ticket]
                    self._end(flight)
                self._changed.notify_all()

    def _is_complete(self, flight: Flight) -> bool:
        assert self._cuda is not None
        failure = flight.failure
        try:
            self._cuda.use_device(flight.device)
            if not self._cuda.has_passed(flight.event):
                return False
        except StepFailed as failed:
            failure = failure or str(failed)
        flight.event, flight.failure = 0, failure
        return True

    def _wait_for_copy(self, flight: Flight) -> None:
        if flight.event:
            while not self._is_complete(flight):
                time.sleep(POLL_S)
                self._reap()
            if flight.failure:
                raise StepFailed(flight.failure)


class PythonQueue(TransferQueue):
    """A transfer queue whose worker is a Python thread."""

    def _make_core(self, name: str, num_in_flight: int, cuda_library: str | None) -> Core:
        return PythonCore(name, num_in_flight, cuda_library)
