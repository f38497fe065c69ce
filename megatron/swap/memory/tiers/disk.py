"""The tier on a local disk: bytes pass through pinned buffers, and are read ahead of use.

A write waits only for a free buffer, and a read only for the disk. A disk slower than training slows training down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import torch

from megatron.swap.common.disk_buffers import NUM_AHEAD, staging_bytes
from megatron.swap.devices.base import Device, Stream
from megatron.swap.memory.disk_file import DiskError, DiskFile, padded
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.memory.staging import DiskSpan, Fetched, Staging
from megatron.swap.memory.tiers.base import Slot, Tier, TierStats


class DiskSlot:
    """Room on disk in spans, none longer than a buffer."""

    fence = 0  # copies of the device read the buffers, never the disk

    def __init__(self, spans: list[DiskSpan], freed: deque[DiskSlot]) -> None:
        self.spans = spans
        self.fetched: dict[DiskSpan, Fetched] = {}  # reads ahead of use
        self.is_free = False
        self._freed = freed

    @property
    def sizes(self) -> list[int]:
        return [stop - start for _, start, stop in self.spans]

    def free(self, fence: int = 0) -> None:
        if not self.is_free:
            self.is_free = True
            self._freed.append(self)


class DiskTier(Tier):
    """A tier of room on ``disk``, which it does not close, through buffers of ``buffer_bytes``, ``pinned`` or not."""

    def __init__(self, disk: DiskFile, buffer_bytes: int, pinned: bool) -> None:
        self._disk = disk
        self._buffer_bytes = padded(buffer_bytes)
        self._arena = HostArena(limit_bytes=staging_bytes(buffer_bytes), pinned=pinned)
        self._staging = Staging(disk, self._arena.take, self._buffer_bytes)
        self.host_bytes = self._arena.reserved_bytes  # of the buffers
        self._free: list[DiskSpan] = []
        self._freed: deque[DiskSlot] = deque()
        self._ahead: list[tuple[DiskSlot, DiskSpan]] = []
        self._reserved_bytes = self._leased_bytes = self._leased_peak_bytes = 0

    def reserve(self, num_bytes: int) -> DiskSlot:
        self._collect()
        wanted_bytes = padded(num_bytes)
        free_bytes = sum(stop - start for _, start, stop in self._free)
        if free_bytes < wanted_bytes:
            (room,) = self._disk.take_all([wanted_bytes - free_bytes])
            self._reserved_bytes += room.num_bytes
            self._free.append((room, 0, room.num_bytes))
        spans = []
        while wanted_bytes:
            room, start, stop = self._free[0]
            end = min(stop, start + wanted_bytes, start + self._buffer_bytes)
            spans.append((room, start, end))
            wanted_bytes -= end - start
            self._free[:1] = [(room, end, stop)] if end < stop else []
        self._leased_bytes += sum(stop - start for _, start, stop in spans)
        self._leased_peak_bytes = max(self._leased_peak_bytes, self._leased_bytes)
        room, start, stop = spans[-1]
        spans[-1] = (room, start, stop - (padded(num_bytes) - num_bytes))
        return DiskSlot(spans, self._freed)

    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        assert isinstance(slot, DiskSlot)
        num_copies = 0
        for span, chunk in zip(slot.spans, source.split(slot.sizes), strict=True):
            staged, write_to_disk = self._staging.stage([span])
            num_copies += device.copy(stream, staged, [chunk])
            write_to_disk(device, device.record(stream))
        return num_copies

    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        assert isinstance(slot, DiskSlot)
        self.expect([slot])
        num_copies = 0
        for span, chunk in zip(slot.spans, target.split(slot.sizes), strict=True):
            fetched = slot.fetched.pop(span, None)
            if fetched is None or fetched.is_lost:
                fetched = self._staging.fetch([span])
            num_copies += device.copy(stream, [chunk], fetched.arrived(device, stream))
            fetched.copied(device, device.record(stream))
        return num_copies

    def expect(self, slots: Iterable[Slot]) -> None:
        self._ahead = [(slot, span) for slot, span in self._ahead if span in slot.fetched and not slot.is_free]
        if len(self._ahead) >= NUM_AHEAD:
            return
        for slot in slots:
            assert isinstance(slot, DiskSlot)
            for span in slot.spans:
                if span not in slot.fetched:
                    slot.fetched[span] = self._staging.fetch([span])
                    self._ahead.append((slot, span))
                if len(self._ahead) >= NUM_AHEAD:
                    return

    def _collect(self) -> None:
        """Make the room of freed slots available, with neighbouring spans joined."""
        if not self._freed:
            return
        spans = self._free
        while self._freed:
            freed = self._freed.popleft().spans
            spans += [(room, start, start + padded(stop - start)) for room, start, stop in freed]
            self._leased_bytes -= sum(padded(stop - start) for _, start, stop in freed)
        self._free = []
        for room, start, stop in sorted(spans, key=lambda span: span[0].offset + span[1]):
            if self._free and self._free[-1][0] is room and self._free[-1][2] == start:
                start = self._free.pop()[1]
            self._free.append((room, start, stop))

    def stats(self) -> TierStats:
        self._collect()
        return TierStats(self._reserved_bytes, self._leased_bytes, self._leased_peak_bytes)

    def close(self) -> None:
        with suppress(DiskError):  # the bytes are not needed any more
            self._staging.synchronize()
        self._arena.close()
