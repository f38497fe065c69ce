"""The emulated device for machines without a GPU: RAM is its memory, threads are its copy engines.

It exists to find ordering faults. Copies run later, on another thread, after a random delay if asked for. Released
memory is filled with NaN at once, and memory for a reload starts as NaN. So a missing wait changes the loss.
"""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import GIB, SwapError
from megatron.swap.devices.base import ClockMark, Device, Elapsed, Event, Stream, bytes_of
from megatron.swap.native.guarding import Flag, GuardCore, native, new_guard

POISON = 0xFF  # fills released memory: every float of these bytes is NaN, in any precision

# memmove with the GIL, so that no thread frees memory between the check that it exists and the copy.
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class _TensorBytes:
    """The bytes of a tensor, by address and a weak reference."""

    def __init__(self, data: torch.Tensor) -> None:
        storage = data.untyped_storage()
        self.address = data.data_ptr()
        self.num_bytes = data.numel()
        self._storage = weakref.ref(storage)
        self._storage_bytes = storage.nbytes()

    def exists(self) -> bool:
        storage = self._storage()
        return storage is not None and storage.nbytes() == self._storage_bytes


class EmulatedEvent:
    """An event that passes when its stream's thread reaches it. It has the stream's failure, if any."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._failure: BaseException | None = None
        self._flag: Flag | None = None

    def trigger(self, failure: BaseException | None = None) -> None:
        self._failure = failure
        self._passed.set()
        if self._flag is not None:
            self._flag.raise_()

    @property
    def flag(self) -> Flag:
        """The same event for native code, which cannot wait for a Python event. It has no failure."""
        if self._flag is None:
            self._flag = native().Flag()
        if self._passed.is_set():  # the event may have passed before the flag was made
            self._flag.raise_()
        return self._flag

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        self._passed.wait()
        if self._failure is not None:
            raise SwapError(f"an emulated copy failed: {self._failure}") from self._failure


class ComputeStream:
    """The calling thread: work is done when a call returns, so an event has passed when it is recorded."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComputeStream)

    def __hash__(self) -> int:
        return hash(ComputeStream)

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        event = event or EmulatedEvent()
        event.trigger()
        return event

    def wait_event(self, event: EmulatedEvent) -> None:
        event.synchronize()  # this stream is the calling thread, so the thread waits


class CopyStream:
    """A thread that runs enqueued work in order. Each copy waits for a random delay first."""

    def __init__(self, name: str, longest_delay_s: float, seed: int) -> None:
        self.direction = {"out": "DtoH", "in": "HtoD"}.get(name, name)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._longest_delay_s = longest_delay_s
        self._random = random.Random(seed)
        self.failure: BaseException | None = None
        # A daemon: a device that was never closed does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"swap-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record_event(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        recorded = event or EmulatedEvent()
        self.enqueue(lambda: recorded.trigger(self.failure))
        return recorded

    def wait_event(self, event: EmulatedEvent) -> None:
        self.enqueue(event.synchronize)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as failure:
                self.failure = failure

    def delay(self) -> None:
        if self._longest_delay_s:
            time.sleep(self._random.uniform(0, self._longest_delay_s))

    def end(self) -> None:
        """Let the thread end behind its enqueued work."""
        self._work.put(None)

    def join(self) -> None:
        self._thread.join()


class EmulatedDevice(Device):
    """RAM as a device. Each copy waits for a random delay up to ``longest_delay_s``, from ``seed``.

    ``ranges`` receive each copy and its launch, with its number: a profiler sees neither. ``memory_gib`` limits the
    tensors made until ``close`` and needs the C++ part; None for no limit.
    """

    def __init__(
        self, longest_delay_s: float = 0.0, seed: int = 0, ranges: Ranges | None = None, memory_gib: float | None = None
    ) -> None:
        self._is_limited = memory_gib is not None
        if memory_gib is not None:
            native("memory of an emulated device needs").limit_ram(int(memory_gib * GIB))
        self._ranges = ranges or Ranges()
        self._num_copies = 0
        self.torch_device = torch.device("cpu")
        self.name = "cpu"
        self.keeps_time = False  # other programs use this CPU too
        self._longest_delay_s = longest_delay_s
        self._seed = seed
        self._streams: list[CopyStream] = []
        self._when_dropped = weakref.finalize(self, _end, self._streams, self._is_limited)  # unless closed before
        self._when_dropped.atexit = False

    def current_stream(self) -> ComputeStream:
        return ComputeStream()

    def copy_stream(self, name: str) -> CopyStream:
        stream = CopyStream(name, self._longest_delay_s, self._seed + len(self._streams))
        self._streams.append(stream)
        return stream

    def timed_wait(self, stream: Stream, event: Event) -> Elapsed:
        start_ms = self.host_ms()
        self.wait(stream, event)
        return Elapsed(self.host_ms() - start_ms)

    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        assert isinstance(stream, CopyStream)
        # Weak references and addresses, as in a copy engine: a copy keeps no memory alive that the engine has released.
        # A tensor that is gone or emptied by its owner (`resize_(0)`) is skipped. A GPU would copy the bytes that are
        # at its address by then.
        moves = [
            (self._launched(), _TensorBytes(target), _TensorBytes(source))
            for target, source in zip(targets, sources, strict=True)
        ]

        def run() -> None:
            stream.delay()
            for number, target, source in moves:
                with self._ranges.mark(f"emulated copy {number} {stream.direction} {target.num_bytes}"):
                    if target.exists() and source.exists():
                        _memmove(target.address, source.address, target.num_bytes)

        stream.enqueue(run)
        return len(moves)

    def _launched(self) -> int:
        self._num_copies += 1
        with self._ranges.mark(f"emulated launch {self._num_copies}"):
            return self._num_copies

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def discard(self, storage: torch.UntypedStorage) -> None:
        bytes_of(storage).fill_(POISON)

    def peak_bytes(self) -> int | None:
        return native().ram_peak() if self._is_limited else None

    def make_guard(self) -> GuardCore:
        self.guard = new_guard()
        return self.guard

    def native_event(self, event: Event) -> int:
        assert isinstance(event, EmulatedEvent)
        return event.flag.address

    def mark(self) -> ClockMark:
        return ClockMark(self.host_ms())

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.record_event().synchronize()

    def close(self) -> None:
        self._when_dropped.detach()
        _end(self._streams, self._is_limited)
        for stream in self._streams:
            stream.join()
        self._streams.clear()


def _end(streams: Sequence[CopyStream], is_limited: bool) -> None:
    """End the threads of ``streams`` and the limit of memory."""
    # It waits for nothing: a finalizer may run on any thread.
    for stream in streams:
        stream.end()
    if is_limited:
        native().unlimit_ram()
