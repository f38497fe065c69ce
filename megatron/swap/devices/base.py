"""The contract between the engine and a device.

A *stream* runs its work in order. An *event* marks a point in a stream. ``wait`` holds back all later work of a stream
until an event has passed. The calling thread waits for the device only in ``finish`` and ``synchronize``.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import torch

from megatron.swap.common.counters import Stall
from megatron.swap.common.types import UsageError
from megatron.swap.native.guarding import GuardCore

ALIGNMENT_BYTES = 512  # of the caching allocator's blocks, and of tensors that share a buffer


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of ``storage`` as one uint8 tensor, [num_bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Event(Protocol):
    """A point in a stream; it passes when all work before is done. ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the event has passed. Never waits."""

    def synchronize(self) -> None:
        """Make the calling thread wait until the event has passed. Raises a ``SwapError`` if work before has failed."""


class Stream(Protocol):
    """Work of a device that runs in the order in which it was enqueued. ``torch.cuda.Stream`` is one.

    Two objects of the same stream are equal and have the same hash. A stream takes the events of its own device only.
    """

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new event, behind the work enqueued so far, and return it."""

    def wait_event(self, event: Any) -> None:
        """Let work enqueued from now on start after ``event``."""


class Mark(Protocol):
    """A timestamp on the stream that was current when the mark was made."""

    def elapsed_ms_since(self, other: Any) -> float:
        """Return the milliseconds since ``other``, a mark of the same device. Valid only after ``synchronize``."""


class Elapsed:
    """A stall of known length."""

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def elapsed_ms(self) -> float:
        return self._ms


class ClockMark:
    """A moment of a clock that the host can read."""

    def __init__(self, now_ms: float) -> None:
        self._now_ms = now_ms

    def elapsed_ms_since(self, other: ClockMark) -> float:
        return self._now_ms - other._now_ms


class Device(ABC):
    """Streams, events and memory of one device. Figures are ``None`` where the device does not measure them."""

    torch_device: torch.device  # where PyTorch allocates
    name: str  # of the hardware, for messages
    keeps_time = True  # equal work takes equally long, so that times can be compared
    guard: GuardCore | None = None  # evicts storages when an allocation fails; None before `make_guard`

    @functools.cached_property
    def copier(self) -> Copier:
        """Orders the copies of all that share this device."""
        return Copier(self)

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream that the caller computes on. Ask before entering any other stream's context."""

    @abstractmethod
    def copy_stream(self, name: str) -> Stream:
        """Make a stream for copies in one direction."""

    def record(self, stream: Stream) -> Event:
        """Make an event that passes when all work enqueued on ``stream`` so far is done."""
        event: Event = stream.record_event()
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Let work enqueued on ``stream`` from now on start after ``event``."""
        stream.wait_event(event)

    @abstractmethod
    def timed_wait(self, stream: Stream, event: Event) -> Stall:
        """Wait as ``wait`` does, and measure how long ``stream`` is idle for it."""

    def has_passed(self, event: Event) -> bool:
        """Whether ``event`` has passed. Never waits."""
        return event.query()

    def finish(self, event: Event) -> None:
        """Make the calling thread wait until ``event`` has passed. Any thread may."""
        event.synchronize()

    def host_ms(self) -> float:
        """Return the host's clock in milliseconds since some moment."""
        return 1e3 * time.perf_counter()

    @abstractmethod
    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        """Enqueue copies between two lists of uint8 tensors, pairwise of equal length. Return the number of copies.

        A device may split long tensors. The caller keeps both sides until an event behind this call has passed.
        ``copy_stream`` made the stream.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory of the current stream, undefined, or raise a ``torch.OutOfMemoryError``."""

    def discard(self, storage: torch.UntypedStorage) -> None:
        """Note that the last reference to ``storage`` is about to be dropped."""
        # The caching allocator hands the block to later work of the same stream, which is ordered: nothing to do.
        return

    def used_on(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Note that ``storage`` is read on ``stream``, and was allocated on another stream."""
        return  # a device whose memory is not recycled behind a read has nothing to order

    def peak_bytes(self) -> int | None:
        """Return the most device memory allocated since the start."""
        return None

    def allocated_bytes(self) -> int | None:
        """Return the device memory allocated now."""
        return None

    def take_peak(self) -> tuple[int, int] | None:
        """Return the most bytes allocated since the last call, and the bytes allocated now."""
        return None

    def reserved_bytes(self) -> int | None:
        """Return the bytes that the allocator has reserved, in use or not."""
        return None

    def peak_reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator has reserved since the start."""
        return None

    def take_retries(self) -> int:
        """Return the allocations since the last call for which the allocator had to wait and empty its cache."""
        return 0

    def release_cached(self) -> None:
        """Let the allocator return its unused memory to the device. This may be slow."""
        return

    def allocate_if_free(self, num_bytes: int) -> torch.Tensor | None:
        """Allocate as ``allocate`` does, or return ``None`` if there is no room. The guard evicts nothing."""
        try:
            if self.guard is not None:
                self.guard.pause_here(True)
            return self.allocate(num_bytes)
        except torch.OutOfMemoryError:
            return None
        finally:
            if self.guard is not None:
                self.guard.pause_here(False)

    def allocate_all(self, sizes: Sequence[int], *, is_ahead: bool) -> list[torch.Tensor]:
        """Return a tensor of each size, or raise a ``torch.OutOfMemoryError``; ahead, as many as have room."""
        if not is_ahead:
            return [self.allocate(num_bytes) for num_bytes in sizes]
        found: list[torch.Tensor] = []
        for num_bytes in sizes:
            tensor = self.allocate_if_free(num_bytes)
            if tensor is None:
                break
            found.append(tensor)
        return found

    def make_guard(self) -> GuardCore:
        """Make ``guard``, which takes no host memory before ``set_most_host_bytes``, or raise a ``UsageError``."""
        raise UsageError(f"--swap-oom-guard does not support {self.name}. Leave it out.")

    def leave_free(self, is_wanted: bool) -> None:
        """Limit PyTorch while ``is_wanted``, so that some device memory stays free for libraries."""
        # The guard evicts for PyTorch's allocations only. NCCL allocates when ranks first communicate, and CUDA when a
        # kernel is first called. Both fail if nothing is free.
        return

    def native_event(self, event: Event) -> int:
        """Return the address by which the guard refers to ``event``, or raise a ``UsageError``."""
        raise UsageError(f"--swap-oom-guard does not support {self.name}. Leave it out.")

    @abstractmethod
    def mark(self) -> Mark:
        """Make a mark on the current stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the calling thread wait until all streams are idle."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies, then release the streams and the guard's stream and event."""


class Owner(IntEnum):
    """Owners of copies, the most urgent first."""

    WEIGHTS = 0  # of the layer that runs next
    ACTIVATIONS = 1  # of layers behind that
    STATE = 2  # of the optimizer, whose step comes last


class Lane:
    """The copies of one owner in one direction.

    A copy needs an order behind the work before it: ``begin``, or ``wait`` for an event that is behind this work. Then
    come ``copy`` and ``end``. Copies of more urgent owners that are enqueued already go first.
    """

    def __init__(self, device: Device, stream: Stream, owner: Owner, last: dict[Owner, Event]) -> None:
        self.stream = stream  # its own: a wait of one owner must not hold back the copies of another
        self._device = device
        self._owner = owner
        self._last = last  # passes after the last copies of each owner in this direction

    def begin(self, *writers: Stream) -> None:
        """Let the coming copies start after the work enqueued so far on ``writers``; without any, on compute."""
        for writer in writers or (self._device.current_stream(),):
            self._device.wait(self.stream, self._device.record(writer))
        for other in Owner:
            # All copies in one direction share one hardware queue. Without this wait the 32 MiB pieces of these copies
            # would take turns with pieces of more urgent ones.
            if other < self._owner and other in self._last:
                self._device.wait(self.stream, self._last[other])

    def wait(self, event: Event | None) -> None:
        """Let the coming copies start after ``event``, if there is one."""
        if event is not None:
            self._device.wait(self.stream, event)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        """Enqueue copies as ``Device.copy`` does. Return their number."""
        return self._device.copy(self.stream, targets, sources)

    def end(self) -> Event:
        """Return an event that passes when all copies enqueued so far are complete."""
        event = self._last[self._owner] = self._device.record(self.stream)
        return event


class Copier:
    """The lanes of a device. A transfer queue (`tensor_swap`) stands apart: it withdraws copies; no stream can."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last: dict[str, dict[Owner, Event]] = {"in": {}, "out": {}}

    def lane(self, direction: str, owner: Owner) -> Lane:
        """Return a new lane. ``direction`` is ``in``, to the device, or ``out``."""
        return Lane(self._device, self._device.copy_stream(direction), owner, self._last[direction])
