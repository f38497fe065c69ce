"""The dry device: the meta device of PyTorch, whose tensors have no bytes, with a clock and a count of memory.

Nothing is computed or copied. The caller that runs operators says how long each takes and which storages it makes. A
step then looks to a recorder as on a GPU. An operator begins when the operator before is done and the host has launched
it. The host has a clock of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from megatron.swap.devices.base import ClockMark, Device, Elapsed, Event, Stream
from megatron.swap.devices.dry_allocator import NO_END, Block, DryAllocator


class DryStream:
    """A stream whose work ends at ``end_ms``. The compute stream's ``end_ms`` is the device's clock."""

    def __init__(self, compute: DryStream | None = None) -> None:
        self.end_ms = 0.0
        self._compute = compute or self

    def record_event(self, event: DryEvent | None = None) -> DryEvent:
        event = event or DryEvent(self._compute)
        event.at_ms = self.end_ms
        return event

    def wait_event(self, event: DryEvent) -> None:
        self.end_ms = max(self.end_ms, event.at_ms)


class DryEvent:
    """An event that passes at ``at_ms``."""

    def __init__(self, compute: DryStream) -> None:
        self.at_ms = 0.0
        self._compute = compute

    def query(self) -> bool:
        return self.at_ms <= self._compute.end_ms

    def synchronize(self) -> None:
        self._compute.wait_event(self)


class DryDevice(Device):
    """A device without bytes that stands for the hardware ``name``.

    ``link_gb_s`` is the speed of copies in one direction, ``link_both_gb_s`` of each while both copy. Others are as for
    ``DryAllocator``.
    """

    def __init__(
        self, name: str, expandable: bool = False, link_gb_s: float = 50.0, link_both_gb_s: float = 50.0,
        capacity_bytes: int = NO_END,
    ) -> None:  # fmt: skip
        self.torch_device = torch.device("meta")
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._compute = DryStream()
        self._host_ms = 0.0
        self._copy_streams: list[DryStream] = []
        self._link_gb_s, self._link_both_gb_s = link_gb_s, link_both_gb_s
        self._held_bytes = self._peak_bytes = self._recent_peak_bytes = 0
        self._held: set[int] = set()
        self._allocator = DryAllocator(expandable, capacity_bytes)

    def run(self, ms: float, workspace_bytes: Sequence[int] = (), host_ms: float = 0.0) -> None:
        """Advance the clocks by an operator of ``ms``, 0 for a view, with blocks of ``workspace_bytes`` meanwhile."""
        self._host_ms += host_ms
        if ms:
            self._compute.end_ms = max(self._compute.end_ms, self._host_ms) + ms
        for block in reversed([self._count(num_bytes) for num_bytes in workspace_bytes]):
            self._free(block)

    def take(self, num_bytes: int) -> None:
        """Count ``num_bytes`` that a library takes from PyTorch's allocator and keeps."""
        self._count(num_bytes)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage``, in blocks of the allocator, until it is freed. A second call does nothing."""
        address = storage._cdata
        if address in self._held or not storage.nbytes():
            return
        block = self._count(storage.nbytes())

        def free() -> None:
            self._held.discard(address)
            self._free(block)

        weakref.finalize(storage, free).atexit = False
        self._held.add(address)

    def current_stream(self) -> DryStream:
        return self._compute

    def copy_stream(self, name: str) -> DryStream:
        self._copy_streams.append(DryStream(self._compute))
        return self._copy_streams[-1]

    def timed_wait(self, stream: Stream, event: Event) -> Elapsed:
        assert isinstance(stream, DryStream)
        begin_ms = stream.end_ms
        self.wait(stream, event)
        return Elapsed(stream.end_ms - begin_ms)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)
        self.hold(tensor.untyped_storage())
        return tensor

    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        assert isinstance(stream, DryStream)
        begin_ms = max(stream.end_ms, self._compute.end_ms)
        is_alone = all(other is stream or other.end_ms <= begin_ms for other in self._copy_streams)
        speed = self._link_gb_s if is_alone else self._link_both_gb_s
        stream.end_ms = begin_ms + sum(source.nbytes for source in sources) / (speed * 1e6)
        return len(sources)

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def allocated_bytes(self) -> int:
        return self._held_bytes

    def reserved_bytes(self) -> int:
        return self._allocator.reserved_bytes

    def peak_reserved_bytes(self) -> int:
        return self._allocator.peak_bytes

    def take_retries(self) -> int:
        num_retries, self._allocator.num_retries = self._allocator.num_retries, 0
        return num_retries

    def release_cached(self) -> None:
        self._allocator.release_cached()

    def take_peak(self) -> tuple[int, int]:
        peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, self._held_bytes
        return peak_bytes, self._held_bytes

    def host_ms(self) -> float:
        return self._host_ms

    def mark(self) -> ClockMark:
        return ClockMark(self._compute.end_ms)

    def synchronize(self) -> None:
        for stream in self._copy_streams:
            stream.record_event().synchronize()
        self._host_ms = max(self._host_ms, self._compute.end_ms)

    def close(self) -> None:
        self.synchronize()

    def _count(self, num_bytes: int) -> Block:
        block = self._allocator.allocate(num_bytes)
        self._held_bytes += block.num_bytes
        self._recent_peak_bytes = max(self._recent_peak_bytes, self._held_bytes)
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        return block

    def _free(self, block: Block) -> None:
        self._held_bytes -= block.num_bytes
        self._allocator.free(block)
