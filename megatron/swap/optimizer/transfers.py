"""Copies of optimizer state between device, host memory and disk, on lanes of their own.

State on disk passes through pinned buffers (`memory.staging`): the host waits for reads before it enqueues their
copies, and never waits for writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from megatron.swap.common.rounding import round_up
from megatron.swap.devices.base import ALIGNMENT_BYTES, Device, Event, Mark, Owner
from megatron.swap.memory.disk_file import DiskRoom, padded
from megatron.swap.memory.staging import NUM_AHEAD, DiskSpan, Fetched, Staging
from megatron.swap.optimizer.param_state import MAIN, ParamShard, ParamState, Span, batches
from megatron.swap.optimizer.state_memory import StateMemory


class Move(NamedTuple):
    """Bytes on the device (uint8), and their target."""

    target: Span
    source: torch.Tensor


@dataclass(eq=False)
class Bucket:
    """Shards on the device, or with copies in flight to it."""

    tensors: dict[ParamShard, dict[str, torch.Tensor]]  # flat tensors of each shard by name, views of ``buffer``
    buffer: torch.Tensor
    event: Event  # passes when all copies have arrived


@dataclass(eq=False)
class PendingBucket:
    """Shards that will be loaded next; their tensors on disk are being read."""

    shards: Sequence[ParamShard]
    read: Fetched | None  # None if nothing is on disk

    @property
    def is_read(self) -> bool:
        """Whether the read from disk has ended, so that loading does not wait."""
        return self.read is None or self.read.has_arrived

    @property
    def num_bytes(self) -> int:
        """Device bytes for the step, including moments that the optimizer creates in its first step."""
        spans = (shard.span_of(tensor) for shard in self.shards for tensor in shard.param_state.tensors.values())
        return sum(_aligned(stop - start) for _, start, stop in spans)


@dataclass(eq=False)
class _Offload:
    """Copies in flight to the host."""

    # Held until ``event`` has passed: the copies read them.
    storages: list[torch.UntypedStorage]
    event: Event
    shards: list[ParamShard]


class StateTransfers:
    """Loads shards to the device and offloads them, at most ``bucket_bytes`` at a time."""

    def __init__(self, device: Device, memory: StateMemory, bucket_bytes: int) -> None:
        self._device = device
        self.memory = memory
        self.bucket_bytes = bucket_bytes
        # State on disk is copied in whole blocks.
        self._staged_bytes = padded(bucket_bytes)
        self._staging = None if memory.disk is None else Staging(memory.disk, memory.arena.take, bucket_bytes)
        self._in, self._out = (device.copier.lane(direction, Owner.STATE) for direction in ("in", "out"))
        self._offloads: deque[_Offload] = deque()
        self._offloading_shards: set[ParamShard] = set()
        self.num_ahead = 1 if memory.disk is None else NUM_AHEAD  # number of buckets that may be pending at once
        # Bytes copied so far in each direction; device memory of loads and offloads that is not released yet.
        self.out_bytes = self.in_bytes = self.device_bytes = 0

    def mark(self) -> Mark:
        return self._device.mark()

    # ------------------------------------------------------------------ loading

    def begin_load(self, shards: Sequence[ParamShard]) -> PendingBucket:
        """Begin to read the tensors of ``shards`` that are on disk."""
        spans = _on_disk(shard.span_of(tensor) for shard in shards for _, tensor in shard.tensors_to_load())
        return PendingBucket(shards, self._staging.fetch(spans) if spans and self._staging else None)

    def load(self, pending: PendingBucket, *, is_ahead: bool = False) -> Bucket | None:
        """Allocate a buffer and enqueue copies into it. ``is_ahead``: or None, rather than take others' memory."""
        # The last offload of such a shard is in flight. Compute waits for it here, and the H2D stream for compute.
        if not self._offloading_shards.isdisjoint(pending.shards):
            self.release_offloaded()
        # Another optimizer has taken the read buffers.
        if pending.read is not None and pending.read.is_lost:
            pending = self.begin_load(pending.shards)
        spans = (shard.span_of(tensor) for shard in pending.shards for _, tensor in shard.tensors_to_load())
        num_bytes = sum(_aligned(stop - start) for _, start, stop in spans)
        # Buffers are allocated on the compute stream, which later uses them.
        buffer = self._device.allocate_if_free(num_bytes) if is_ahead else self._device.allocate(num_bytes)
        return None if buffer is None else self._load_into(buffer, pending)

    def load_now(self, shard: ParamShard) -> Bucket:
        """Load a bucket of ``shard`` alone. Compute waits for the copies."""
        bucket = self.load(self.begin_load([shard]))
        assert bucket is not None
        self.wait_for(bucket)
        return bucket

    def _load_into(self, buffer: torch.Tensor, pending: PendingBucket) -> Bucket:
        self.device_bytes += buffer.numel()
        tensors: dict[ParamShard, dict[str, torch.Tensor]] = {shard: {} for shard in pending.shards}
        staged = iter(pending.read.arrived(self._device, self._in.stream) if pending.read is not None else ())
        targets, sources = [], []
        offset = 0
        for shard in pending.shards:
            for name, offloaded in shard.tensors_to_load():
                _, start, stop = shard.span_of(offloaded)
                backing = offloaded.backing
                sources.append(next(staged) if isinstance(backing, DiskRoom) else backing[start:stop])
                targets.append(buffer[offset : offset + stop - start])
                tensors[shard][name] = targets[-1].view(offloaded.dtype)
                offset += _aligned(stop - start)
        # The buffer may be recycled memory that compute still uses.
        self._in.begin()
        self._in.copy(targets, sources)
        self.in_bytes += sum(source.numel() for source in sources)
        bucket = Bucket(tensors, buffer, self._in.end())
        if pending.read is not None:
            # The read buffers are free for other reads once the copies from them have passed.
            pending.read.copied(self._device, bucket.event)
        return bucket

    def wait_for(self, bucket: Bucket) -> None:
        self._device.wait(self._device.current_stream(), bucket.event)

    def load_whole(self, param_state: ParamState) -> dict[str, torch.Tensor]:
        """Return all offloaded tensors by name, flat, each in its own device memory. Compute waits for the copies."""
        whole: dict[str, torch.Tensor] = {}
        for shard in param_state.shards:
            bucket = self.load_now(shard)
            for name, values in bucket.tensors[shard].items():
                offloaded = param_state.tensors[name]
                if name not in whole:
                    whole[name] = self._device.allocate(offloaded.num_bytes).view(offloaded.dtype)
                whole[name][shard.start : shard.stop].copy_(values)
            self.discard(bucket)
        return whole

    def load_main(self, param_state: ParamState) -> torch.Tensor:
        """Return the parameter's own values, flat, in device memory of their own. Compute waits for the copies."""
        self.release_offloaded()  # the shards below are others than those of offloads in flight
        offloaded = param_state.tensors[MAIN]
        whole = self._device.allocate(offloaded.num_bytes).view(offloaded.dtype)
        for shard in param_state.shards or [ParamShard(param_state, 0, param_state.param.numel())]:
            without_moments = ParamShard(param_state, shard.start, shard.stop)
            bucket = self.load_now(without_moments)
            whole[shard.start : shard.stop].copy_(bucket.tensors[without_moments][MAIN])
            self.discard(bucket)
        return whole

    def discard(self, bucket: Bucket) -> None:
        """Release the memory of a loaded bucket without stepping it."""
        self.wait_for(bucket)  # the copies still write there
        self._free(bucket.buffer.untyped_storage())

    # --------------------------------------------------------------- offloading

    def offload_main_param(self, param: torch.Tensor) -> ParamState:
        """Offload a newly created parameter, whose memory has no other references."""
        param_state = ParamState(param)
        offloaded = self.memory.tensor(param_state, MAIN, param.dtype)
        source = as_bytes(param)
        bounds = [*range(0, offloaded.num_bytes, self._staged_bytes), offloaded.num_bytes]
        self.offload([Move(Span(offloaded, start, stop), source[start:stop]) for start, stop in pairwise(bounds)])
        offloaded.release()
        self.release_offloaded()
        return param_state

    def offload(self, moves: Sequence[Move], bucket: Bucket | None = None) -> None:
        """Enqueue copies to the host. Hold the sources and the buffer of ``bucket`` until ``release_offloaded``."""
        # Compute may still write the sources.
        self._out.begin()
        event = None
        # The disk-bound part of each batch fits into a staging buffer.
        for batch in batches(moves, _disk_bytes, self._staged_bytes):
            spans = _on_disk(move.target for move in batch)
            staged, write = self._staging.stage(spans) if spans and self._staging else ([], None)
            staged_targets = iter(staged)
            targets = [
                next(staged_targets) if isinstance(tensor.backing, DiskRoom) else tensor.backing[start:stop]
                for (tensor, start, stop), _ in batch
            ]
            self._out.copy(targets, [move.source for move in batch])
            event = self._out.end()
            if write is not None:
                # A thread writes to disk once the copy to the staging buffer has passed.
                write(self._device, event)
        self.out_bytes += sum(move.source.numel() for move in moves)
        if event is not None:
            self._hold(moves, bucket, event)

    def _hold(self, moves: Sequence[Move], bucket: Bucket | None, event: Event) -> None:
        """Hold the sources of copies until ``event`` has passed."""
        storages = {storage.data_ptr(): storage for storage in (move.source.untyped_storage() for move in moves)}
        if bucket is not None:
            storages.pop(bucket.buffer.data_ptr(), None)
        self.device_bytes += sum(storage.nbytes() for storage in storages.values())
        buffers = [] if bucket is None else [bucket.buffer.untyped_storage()]
        shards = [] if bucket is None else list(bucket.tensors)
        self._offloads.append(_Offload([*storages.values(), *buffers], event, shards))
        self._offloading_shards.update(shards)

    @property
    def offloading_bytes(self) -> int:
        """Device memory of copies in flight to the host."""
        return sum(storage.nbytes() for offload in self._offloads for storage in offload.storages)

    @property
    def loaded_bytes(self) -> int:
        """Device memory of loaded buckets whose offload has not begun."""
        return self.device_bytes - self.offloading_bytes

    def release_offloaded(self, max_bytes: int = 0) -> None:
        """Release device memory whose copy to the host is enqueued, oldest first. At most ``max_bytes`` may stay."""
        offloading_bytes = self.offloading_bytes
        while self._offloads and offloading_bytes > max_bytes:
            oldest = self._offloads.popleft()
            # Later kernels may get the memory, so compute waits for the copies that read it.
            self._device.wait(self._device.current_stream(), oldest.event)
            self._offloading_shards.difference_update(oldest.shards)
            for storage in oldest.storages:
                offloading_bytes -= storage.nbytes()
                self._free(storage)

    def _free(self, storage: torch.UntypedStorage) -> None:
        self.device_bytes -= storage.nbytes()
        self._device.discard(storage)

    def synchronize(self) -> None:
        """Wait for every copy and write: host memory and disk hold the last step's state. Raises ``DiskError``."""
        self.release_offloaded()
        self._device.synchronize()
        if self._staging is not None:
            self._staging.synchronize()


def _on_disk(spans: Iterable[Span]) -> list[DiskSpan]:
    return [(span.tensor.backing, span.start, span.stop) for span in spans if isinstance(span.tensor.backing, DiskRoom)]


def _disk_bytes(move: Move) -> int:
    (tensor, start, stop), _ = move
    return padded(stop - start) if isinstance(tensor.backing, DiskRoom) else 0


def _aligned(num_bytes: int) -> int:
    return round_up(num_bytes, ALIGNMENT_BYTES)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, flat (uint8); a copy where it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
