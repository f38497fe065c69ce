"""A GPU, through torch.cuda."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.swap.common.types import GIB, MIB
from megatron.swap.devices.base import Device, Elapsed, Event, Stream, bytes_of
from megatron.swap.native.guarding import GuardCore, cuda_guard, stop_watching_allocator

# Most bytes that one stream copies without a break, and the size of the chunks that tensors are split into. All copies
# in one direction share one hardware queue, whatever their streams, so copies of others wait for everything that is
# being offloaded (but see host_writes.py). Copies that wait for another stream let others pass, so our copies alternate
# between two streams; on an H200 that is no slower. With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue, and
# turns do not help: each tensor is one copy, which takes fewer calls.
COPY_CHUNK_BYTES = 32 * MIB

# Bytes that `leave_free` leaves for kernels, and among ranks for NCCL's buffers too. In a pipeline of two H200 with 2
# GiB left free, 16 MiB were still free in the end.
FREE_ALONE_BYTES = 256 * MIB
FREE_AMONG_RANKS_BYTES = 4 * GIB


def expands_segments() -> bool:
    """Whether an environment variable sets PyTorch's allocator to expandable segments."""
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def most_fraction(reserved_bytes: int, free_bytes: int, total_bytes: int, others_bytes: int) -> float:
    """Return the fraction of the device's memory that PyTorch may reserve if ``others_bytes`` stay free.

    At most a 16th of the device stays free. The fraction is at least the memory that PyTorch has reserved already.
    """
    left_bytes = min(others_bytes, total_bytes // 16)
    return (reserved_bytes + max(0, free_bytes - left_bytes)) / total_bytes


def _set_fraction(device: torch.device, before: float, ours: float) -> None:
    """Undo the limit ``ours`` of PyTorch's memory, unless the user has set another limit since."""
    if torch.cuda.get_per_process_memory_fraction(device) == ours:
        torch.cuda.set_per_process_memory_fraction(before, device)


class _Stall:
    def __init__(self) -> None:
        self.before = torch.cuda.Event(enable_timing=True)
        self.after = torch.cuda.Event(enable_timing=True)

    def elapsed_ms(self) -> float | None:
        return self.before.elapsed_time(self.after) if self.after.query() else None


class _Mark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def elapsed_ms_since(self, other: _Mark) -> float:
        return other._event.elapsed_time(self._event)


@dataclass
class _Turns:
    """The two streams that alternate for one copy stream."""

    own: torch.cuda.Stream
    other: torch.cuda.Stream
    turn_bytes: int = 0  # copied by the current stream in its turn


class CudaDevice(Device):
    """The current CUDA device. Streams and events are torch's."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)
        self._known: dict[int, torch.cuda.Stream] = {}
        self._turns: dict[Stream, _Turns] = {}
        self._takes_turns = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"  # CUDA reads it once, as it starts
        self._peak_bytes = self._peak_reserved_bytes = 0
        self._num_retries = 0
        self._guard_objects: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._limit: weakref.finalize[Any, CudaDevice] | None = None  # undone, too, if the device is dropped

    def current_stream(self) -> torch.cuda.Stream:
        # torch.cuda.current_stream makes an object at every call, and the engine asks several times a saved storage.
        address = torch._C._cuda_getCurrentRawStream(self.torch_device.index)
        stream = self._known.get(address)
        if stream is None:
            stream = self._known[address] = torch.cuda.current_stream(self.torch_device)
        return stream

    def copy_stream(self, name: str) -> torch.cuda.Stream:
        stream = torch.cuda.Stream(self.torch_device)
        self._turns[stream] = _Turns(stream, torch.cuda.Stream(self.torch_device))
        return stream

    def timed_wait(self, stream: Stream, event: Event) -> _Stall | Elapsed:
        if event.query():
            # Enqueued all the same: the wait costs nothing, and the order must not depend on when the host looked.
            stream.wait_event(event)
            return Elapsed(0.0)
        stall = _Stall()
        stream.record_event(stall.before)
        stream.wait_event(event)
        stream.record_event(stall.after)
        return stall

    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        turns, num_copies = self._turns[stream], 0
        if not self._takes_turns:
            with turns.own:  # in C++: the context of torch.cuda.stream takes as long as the copy
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            return len(targets)
        current = turns.own
        for target, source in zip(targets, sources, strict=True):
            chunks = zip(target.split(COPY_CHUNK_BYTES), source.split(COPY_CHUNK_BYTES), strict=True)
            for target_chunk, source_chunk in chunks:
                num_bytes = target_chunk.numel()
                if turns.turn_bytes + num_bytes > COPY_CHUNK_BYTES:
                    previous, current = current, turns.other if current is turns.own else turns.own
                    current.wait_stream(previous)  # the chunks are copied in order
                    turns.turn_bytes = 0
                with current:
                    target_chunk.copy_(source_chunk, non_blocking=True)
                turns.turn_bytes += num_bytes
                num_copies += 1
        if current is not turns.own:  # callers record their events on `own`
            turns.own.wait_stream(current)
            turns.turn_bytes = 0
        return num_copies

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def used_on(self, storage: torch.UntypedStorage, stream: Stream) -> None:
        assert isinstance(stream, torch.cuda.Stream)
        # Only for the rare tensor that a side stream reads (Megatron's shared-expert overlap). Its freed block is
        # reused on the stream that allocated it, and nothing else orders that stream behind this one.
        bytes_of(storage).record_stream(stream)

    def peak_bytes(self) -> int:
        return max(self._peak_bytes, torch.cuda.max_memory_allocated(self.torch_device))

    def allocated_bytes(self) -> int:
        return self._statistics("allocated_bytes")["current"]

    def take_peak(self) -> tuple[int, int]:
        statistics = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        found = statistics["allocated_bytes"]["all"]
        self._peak_bytes = max(self._peak_bytes, found["peak"])
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, statistics["reserved_bytes"]["all"]["peak"])
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return found["peak"], found["current"]

    def reserved_bytes(self) -> int:
        return self._statistics("reserved_bytes")["current"]

    def peak_reserved_bytes(self) -> int:
        return max(self._peak_reserved_bytes, self._statistics("reserved_bytes")["peak"])

    def take_retries(self) -> int:
        before = self._num_retries
        self._num_retries = torch.cuda.memory_stats_as_nested_dict(self.torch_device)["num_alloc_retries"]
        return self._num_retries - before

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def _statistics(self, what: str) -> dict[str, int]:
        # memory_allocated() would first flatten all of the allocator's statistics.
        return torch.cuda.memory_stats_as_nested_dict(self.torch_device)[what]["all"]

    def make_guard(self) -> GuardCore:
        stream, done = torch.cuda.Stream(self.torch_device), torch.cuda.Event()
        done.record(stream)  # an event has no address before its first record
        self.guard = cuda_guard(self.torch_device.index, stream.cuda_stream, done.cuda_event)
        self._guard_objects = stream, done
        return self.guard

    def leave_free(self, is_wanted: bool) -> None:
        now = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        if is_wanted and self._limit is None:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
            is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
            others_bytes = FREE_ALONE_BYTES if is_alone else FREE_AMONG_RANKS_BYTES
            most = most_fraction(self.reserved_bytes(), free_bytes, total_bytes, others_bytes)
            torch.cuda.set_per_process_memory_fraction(min(now, most), self.torch_device)
            ours = torch.cuda.get_per_process_memory_fraction(self.torch_device)
            self._limit = weakref.finalize(self, _set_fraction, self.torch_device, now, ours)
            self._limit.atexit = False
        elif not is_wanted and self._limit is not None:
            self._limit()
            self._limit = None

    def native_event(self, event: Event) -> int:
        assert isinstance(event, torch.cuda.Event)
        return event.cuda_event

    def mark(self) -> _Mark:
        return _Mark(self.current_stream())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for turns in self._turns.values():  # `own` waits for `other` at the end of every copy
            turns.own.synchronize()
        self._turns.clear()
        if self._guard_objects is not None:
            stop_watching_allocator()
            self.leave_free(False)
            self._guard_objects = None
