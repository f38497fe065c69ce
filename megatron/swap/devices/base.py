"""The contract between the manager and a device.

A *stream* runs its work in order; an *event* marks a point in a stream; ``wait`` lets everything that is enqueued on
a stream later wait for an event. None of the calls but ``finish`` and ``synchronize`` makes the calling thread wait for
the device (the emulation's compute stream *is* the calling thread, so there a wait does).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megatron.swap.native.guarding import GuardCore
from megatron.swap.trace import Stall
from megatron.swap.types import UsageError

Stream = Any
Event = Any


class Mark(Protocol):
    """A moment of the stream that was current when it was made."""

    def elapsed_ms_since(self, other: Any) -> float:
        """Milliseconds from ``other``, a mark of the same device; only after ``synchronize``."""
        ...


class Device(ABC):
    """Streams, events and memory of one device."""

    torch_device: torch.device
    name: str
    """Of the hardware, for people."""
    keeps_time = True
    """Whether equal work takes equally long."""
    guard: GuardCore | None = None
    """What takes storages from this device when an allocation fails, once there is one."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """The stream that the caller computes on. Take it before entering any other stream's context."""

    @abstractmethod
    def copy_stream(self, name: str) -> Stream:
        """A new stream for copies in one direction."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """An event that passes when all work enqueued on ``stream`` so far is done."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Work enqueued on ``stream`` from now on starts after ``event``."""

    @abstractmethod
    def timed_wait(self, stream: Stream, event: Event) -> Stall:
        """As ``wait``, and measures how long ``stream`` stood still for it."""

    @abstractmethod
    def has_passed(self, event: Event) -> bool:
        """Whether ``event`` has passed already."""

    def finish(self, event: Event) -> None:
        """Make the calling thread wait until ``event`` has passed; any thread may."""
        event.synchronize()

    @abstractmethod
    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        """Enqueue copies between equally long lists of equally long uint8 tensors; returns in how many pieces.

        The caller keeps both sides alive until an event recorded after this call has passed.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """A uint8 tensor of device memory that belongs to the current stream; its contents are undefined."""

    @abstractmethod
    def discard(self, storage: torch.UntypedStorage) -> None:
        """Called right before the last reference to ``storage`` is dropped."""

    @abstractmethod
    def used_on(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        """``storage`` is read on ``stream``, which is not the one it was allocated on."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Most device memory allocated since the start; ``None`` where that has no meaning."""

    @abstractmethod
    def allocated_bytes(self) -> int | None:
        """Device memory allocated now; ``None`` where that has no meaning."""

    @abstractmethod
    def take_peak(self) -> tuple[int, int] | None:
        """Most bytes allocated since the last call, and bytes allocated now; ``None`` where that has no meaning.

        ``peak_bytes`` stays that of the whole run.
        """

    @abstractmethod
    def reserved_bytes(self) -> int | None:
        """Memory that the allocator holds now, in use or not; ``None`` where that has no meaning."""

    @abstractmethod
    def peak_reserved_bytes(self) -> int | None:
        """Most that the allocator has held in the run, whatever ``take_peak`` forgets; ``None`` as above."""

    def take_retries(self) -> int:
        """Since the last call, allocations for which the allocator had to give back all that it caches, and wait."""
        return 0

    @abstractmethod
    def give_back(self) -> None:
        """Let the allocator give back memory that it holds and nobody uses. May take long."""

    def allocate_if_free(self, num_bytes: int) -> torch.Tensor | None:
        """As ``allocate``; where there is no room nothing is taken from others: ``None``."""
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
        """A tensor of each size; ``is_ahead``: as many of the first as there is room for, nothing taken from others."""
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
        """Make ``guard``, which takes no host memory until it is told how much it may.

        Raises:
            UsageError: there is none here.
        """
        raise UsageError(f"--swap-oom-guard: there is none for {self.name}. Drop it.")

    def leave_free(self, is_wanted: bool) -> None:
        """While that is wanted, PyTorch runs out of memory before the device does. A guard makes room for PyTorch
        alone; libraries allocate too (NCCL when ranks first talk, CUDA when a kernel is first called), and die where
        they find nothing. Without a GPU nothing has to be left.
        """
        return

    def native_event(self, event: Event) -> int:
        """The address by which that guard knows ``event``.

        Raises:
            UsageError: there is none here.
        """
        raise UsageError(f"--swap-oom-guard: there is none for {self.name}. Drop it.")

    @abstractmethod
    def mark(self) -> Mark:
        """A mark on the current stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the calling thread wait until all streams are idle."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all copies, then let go of the streams, and of what the guard needed."""
