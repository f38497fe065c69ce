"""The contract between the engine and a device.

A *stream* runs its work in order. An *event* marks a point in a stream. ``wait`` holds back everything that is enqueued
on a stream later until an event has passed. Only ``finish`` and ``synchronize`` make the calling thread wait for the
device; under the emulation waits on the compute stream do too, because that stream *is* the calling thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron.swap.common.counters import Stall
from megatron.swap.common.types import UsageError
from megatron.swap.native.guarding import GuardCore


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

    Equal and hashable by what it stands for. Events are ``Any`` here, because each stream takes its own device's alone.
    """

    def record_event(self, event: Any = None) -> Any:
        """Mark the end of what is enqueued so far, by ``event`` or by a new one; returns it."""
        ...

    def wait_event(self, event: Any) -> None:
        """Work enqueued from now on starts after ``event``."""
        ...


class Mark(Protocol):
    """A moment of the stream that was current when the mark was made."""

    def elapsed_ms_since(self, other: Any) -> float:
        """Milliseconds from ``other``, a mark of the same device; valid only after ``synchronize``."""
        ...


class Device(ABC):
    """Streams, events and memory of one device.

    Attributes:
        torch_device: where PyTorch allocates.
        name: of the hardware, for people.
        keeps_time: whether equal work takes equally long.
        guard: evicts storages from this device when an allocation fails, once ``make_guard`` has made it.
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
        """As ``wait``, and measure how long ``stream`` stands still for it."""

    def has_passed(self, event: Event) -> bool:
        """Whether ``event`` has passed. Never waits."""
        return event.query()

    def finish(self, event: Event) -> None:
        """Make the calling thread wait until ``event`` has passed; any thread may."""
        event.synchronize()

    @abstractmethod
    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        """Enqueue copies between two equally long lists of uint8 tensors, pairwise of equal length.

        The caller keeps both sides alive until an event recorded after this call has passed.

        Args:
            stream: made by ``copy_stream``.

        Returns:
            The number of copies that were enqueued: long tensors are split.
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
        """Most device memory allocated since the start; ``None`` where that has no meaning."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Device memory allocated now; ``None`` where that has no meaning."""

    @abstractmethod
    def take_peak(self) -> tuple[int, int] | None:
        """Most bytes allocated since the last call, and bytes allocated now; ``None`` where that has no meaning.

        ``peak_bytes`` still counts the whole run.
        """

    @abstractmethod
    def reserved_bytes(self) -> int | None:
        """Memory that the allocator has taken from the device, in use or not; ``None`` where that has no meaning."""

    @abstractmethod
    def peak_reserved_bytes(self) -> int | None:
        """Most that the allocator has taken in the run, whatever ``take_peak`` resets; ``None`` as above."""

    def take_retries(self) -> int:
        """Number of allocations since the last call for which the allocator had to empty its cache, and wait."""
        return 0

    @abstractmethod
    def release_cached(self) -> None:
        """Let the allocator return memory to the device that nobody uses. May take long."""

    def allocate_if_free(self, num_bytes: int) -> torch.Tensor | None:
        """As ``allocate``, but return ``None`` where there is no room; the guard evicts nothing for it."""
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
            is_ahead: the tensors are not needed yet. Then return as many of the first as there is room for; the guard
                evicts nothing for them.

        Raises:
            torch.OutOfMemoryError: there is no room, and they are needed now.
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
            UsageError: this device has none.
        """
        raise UsageError(f"--swap-oom-guard: there is none for {self.name}. Drop it.")

    def leave_free(self, is_wanted: bool) -> None:
        """While ``is_wanted``, let PyTorch run out of memory before the device does; without a GPU do nothing.

        A guard makes room for PyTorch alone. Libraries allocate too (NCCL when ranks first communicate, CUDA when a
        kernel is first called), and fail where they find nothing.
        """
        return

    def native_event(self, event: Event) -> int:
        """The address by which the guard knows ``event``.

        Raises:
            UsageError: this device has no guard.
        """
        raise UsageError(f"--swap-oom-guard: there is none for {self.name}. Drop it.")

    @abstractmethod
    def mark(self) -> Mark:
        """Make a mark on the current stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the calling thread wait until all streams are idle."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies, then release the streams, and what the guard needed."""
