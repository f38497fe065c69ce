"""The contract between the engine and a device.

A *stream* runs its work in order. An *event* marks a point in a stream. ``wait`` holds back all later work of a stream
until an event has passed. Only ``finish`` and ``synchronize`` make the calling thread wait for the device; under the
emulation a wait on the compute stream does too, because that stream *is* the calling thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron.swap.common.counters import Stall
from megatron.swap.common.types import UsageError
from megatron.swap.native.guarding import GuardCore

ALIGNMENT_BYTES = 512
"""Alignment of the caching allocator's blocks, and of tensors that share one buffer."""


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of ``storage`` as one uint8 tensor, [num_bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Event(Protocol):
    """A point in a stream; it passes when all work before that point is done. ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether it has passed. Never waits."""
        ...

    def synchronize(self) -> None:
        """Make the calling thread wait until it has passed; any thread may.

        Raises:
            SwapError: work before it has failed (the emulation; CUDA's own errors are a RuntimeError).
        """
        ...


class Stream(Protocol):
    """Work of a device that runs in the order in which it was enqueued. ``torch.cuda.Stream`` is one.

    Two objects of the same stream are equal and have the same hash. Events are ``Any`` here, because a stream takes
    only its own device's.
    """

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new event, behind the work enqueued so far, and return it."""
        ...

    def wait_event(self, event: Any) -> None:
        """Let work enqueued from now on start after ``event``."""
        ...


class Mark(Protocol):
    """A timestamp on the stream that was current when it was made."""

    def elapsed_ms_since(self, other: Any) -> float:
        """Milliseconds from ``other``, a mark of the same device; valid only after ``synchronize``."""
        ...


class Device(ABC):
    """Streams, events and memory of one device.

    Attributes:
        torch_device: where PyTorch allocates.
        name: of the hardware, for messages.
        keeps_time: whether equal work takes equally long, so that times can be compared.
        guard: evicts storages from this device when an allocation fails; ``None`` before ``make_guard``.
    """

    torch_device: torch.device
    name: str
    keeps_time = True
    guard: GuardCore | None = None

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the caller computes on. Ask for it before entering any other stream's context."""

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
        """Wait as ``wait`` does, and measure how long ``stream`` is idle because of it."""

    def has_passed(self, event: Event) -> bool:
        """Whether ``event`` has passed. Never waits."""
        return event.query()

    def finish(self, event: Event) -> None:
        """Make the calling thread wait until ``event`` has passed; any thread may."""
        event.synchronize()

    def host_ms(self) -> float:
        """Return the time of the host's clock, in milliseconds since some moment."""
        return 1e3 * time.perf_counter()

    @abstractmethod
    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        """Enqueue copies between two equally long lists of uint8 tensors, pairwise of equal length.

        The caller keeps both sides alive until an event recorded after this call has passed.

        Args:
            stream: made by ``copy_stream``.

        Returns:
            The number of copies that were enqueued: a device may split long tensors.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor of device memory that belongs to the current stream; its contents are undefined.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """

    @abstractmethod
    def discard(self, storage: torch.UntypedStorage) -> None:
        """Note that the last reference to ``storage`` is about to be dropped."""

    @abstractmethod
    def used_on(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """Note that ``storage`` is read on ``stream``, which is not the stream it was allocated on."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the most device memory allocated since the start; ``None`` where it is not measured."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Return the device memory allocated now; ``None`` where it is not measured."""

    @abstractmethod
    def take_peak(self) -> tuple[int, int] | None:
        """Return the most bytes allocated since the last call, and those allocated now; ``None`` where not measured.

        ``peak_bytes`` still counts the whole run.
        """

    @abstractmethod
    def reserved_bytes(self) -> int | None:
        """Return the bytes that the allocator has reserved, in use or not; ``None`` where they are not measured."""

    @abstractmethod
    def peak_reserved_bytes(self) -> int | None:
        """Return the most bytes that the allocator has reserved since the start; ``None`` where not measured."""

    def take_retries(self) -> int:
        """Return the allocations since the last call for which the allocator had to wait and empty its cache."""
        return 0

    @abstractmethod
    def release_cached(self) -> None:
        """Let the allocator return its unused memory to the device. This may be slow."""

    def allocate_if_free(self, num_bytes: int) -> torch.Tensor | None:
        """Allocate as ``allocate`` does, but return ``None`` if there is no room. The guard evicts nothing for it."""
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
        """Return a tensor of each size in bytes.

        Args:
            is_ahead: the tensors are not needed yet: return only the first ones, as many as there is room for. The
                guard evicts nothing for them.

        Raises:
            torch.OutOfMemoryError: there is no room, and not ``is_ahead``.
        """
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
        """Make ``guard``. It takes no host memory before ``set_most_host_bytes``.

        Raises:
            UsageError: guards do not support this device.
        """
        raise UsageError(f"--swap-oom-guard does not support {self.name}. Leave it out.")

    def leave_free(self, is_wanted: bool) -> None:
        """Limit PyTorch while ``is_wanted``, so that some device memory stays free. Without a GPU do nothing.

        The guard evicts for PyTorch's allocations only. Libraries allocate too (NCCL when ranks first communicate, CUDA
        when a kernel is first called), and fail if nothing is free.
        """
        return

    def native_event(self, event: Event) -> int:
        """Return the address by which the guard refers to ``event``.

        Raises:
            UsageError: guards do not support this device.
        """
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
