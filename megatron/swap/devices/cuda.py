"""A GPU through torch.cuda."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.swap.devices.base import Device
from megatron.swap.native.guarding import GuardCore, cuda_guard, stop_watching_allocator
from megatron.swap.types import GIB, MIB

IN_A_ROW_BYTES = 32 * MIB
"""Most that is copied without a break, and the size of pieces.

All copies in one direction stand in one line, whatever their streams: a counter that Megatron copies to the host
(tokens of each expert, in every layer) waits for everything that is on its way out. Work that has to wait for another
stream lets the line pass, so copies go by two streams in turns; no slower, on an H200. Where
CUDA_DEVICE_MAX_CONNECTIONS is 1 this does not help: all streams are one line then.
"""


FREE_ALONE_BYTES = 256 * MIB
FREE_AMONG_RANKS_BYTES = 4 * GIB
"""What ``leave_free`` leaves for libraries: NCCL's buffers, made when ranks first talk, and kernels.
Of 2 GiB that a guard left in a pipeline of two H200, 16 MiB were free in the end. On a small device less is left, a
16th of it."""


def expands_segments() -> bool:
    """Whether PyTorch's allocator was told to grow segments that it has (by its variable, older or newer spelling)."""
    told = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return "expandable_segments:true" in told.lower().replace(" ", "")


def most_fraction(reserved_bytes: int, free_bytes: int, total_bytes: int, others_bytes: int) -> float:
    """Of the device's memory, what PyTorch may hold in all so that ``others_bytes`` of what is free stay free, a 16th
    of the device at most. Never less than what it holds already."""
    left_bytes = min(others_bytes, total_bytes // 16)
    return (reserved_bytes + max(0, free_bytes - left_bytes)) / total_bytes


class _Stall:
    """The time between two events of one stream."""

    def __init__(self) -> None:
        self.before = torch.cuda.Event(enable_timing=True)
        self.after = torch.cuda.Event(enable_timing=True)

    def elapsed_ms(self) -> float | None:
        return self.before.elapsed_time(self.after) if self.after.query() else None


class _NoStall:
    def elapsed_ms(self) -> float:
        return 0.0


class _Mark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def elapsed_ms_since(self, other: _Mark) -> float:
        return other._event.elapsed_time(self._event)


@dataclass
class _Turns:
    """The stream that takes turns with another, and what was copied since the last turn."""

    other: torch.cuda.Stream
    in_a_row_bytes: int = 0


class CudaDevice(Device):
    """The current CUDA device. Streams and events are torch's."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)
        self._turns: dict[torch.cuda.Stream, _Turns] = {}
        self._peak_bytes = self._peak_reserved_bytes = 0
        self._num_retries = 0
        self._of_guard: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._fractions: tuple[float, float] | None = None

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def copy_stream(self, name: str) -> torch.cuda.Stream:
        stream = torch.cuda.Stream(self.torch_device)
        self._turns[stream] = _Turns(torch.cuda.Stream(self.torch_device))
        return stream

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def timed_wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> _Stall | _NoStall:
        if event.query():
            # Still placed: it costs nothing on the device, and the order then never hangs on what the host saw.
            stream.wait_event(event)
            return _NoStall()
        stall = _Stall()
        stall.before.record(stream)
        stream.wait_event(event)
        stall.after.record(stream)
        return stall

    def has_passed(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def copy(
        self, stream: torch.cuda.Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> int:
        turns, on, num_pieces = self._turns[stream], stream, 0
        for target, source in zip(targets, sources, strict=True):
            pieces = zip(target.split(IN_A_ROW_BYTES), source.split(IN_A_ROW_BYTES), strict=True)
            for target_piece, source_piece in pieces:
                num_bytes = target_piece.numel()
                if turns.in_a_row_bytes + num_bytes > IN_A_ROW_BYTES:
                    after, on = on, turns.other if on is stream else stream
                    on.wait_stream(after)
                    turns.in_a_row_bytes = 0
                with torch.cuda.stream(on):
                    target_piece.copy_(source_piece, non_blocking=True)
                turns.in_a_row_bytes += num_bytes
                num_pieces += 1
        if on is not stream:  # for whoever waits for it
            stream.wait_stream(on)
            turns.in_a_row_bytes = 0
        return num_pieces

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def discard(self, storage: torch.UntypedStorage) -> None:
        # Nothing to do: the caching allocator gives the block to later work of the same stream, which is ordered.
        pass

    def used_on(self, storage: torch.UntypedStorage, stream: torch.cuda.Stream) -> None:
        # Only for the rare tensor that a side stream consumes (Megatron's shared-expert overlap): the block goes back
        # to the stream that allocated it, and nothing else orders that stream behind this one.
        torch.empty(0, dtype=torch.uint8, device=self.torch_device).set_(storage).record_stream(stream)

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

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def _statistics(self, what: str) -> dict[str, int]:
        # memory_allocated() would first flatten all of the allocator's statistics.
        return torch.cuda.memory_stats_as_nested_dict(self.torch_device)[what]["all"]

    def make_guard(self) -> GuardCore:
        stream, done = torch.cuda.Stream(self.torch_device), torch.cuda.Event()
        done.record(stream)  # it has an address only then
        self.guard = cuda_guard(self.torch_device.index, stream.cuda_stream, done.cuda_event)
        self._of_guard = stream, done
        return self.guard

    def leave_free(self, is_wanted: bool) -> None:
        now = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        if is_wanted and self._fractions is None:
            free_bytes, total_bytes = torch.cuda.mem_get_info(self.torch_device)
            is_alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
            others_bytes = FREE_ALONE_BYTES if is_alone else FREE_AMONG_RANKS_BYTES
            most = most_fraction(self.reserved_bytes(), free_bytes, total_bytes, others_bytes)
            torch.cuda.set_per_process_memory_fraction(min(now, most), self.torch_device)
            self._fractions = now, torch.cuda.get_per_process_memory_fraction(self.torch_device)
        elif not is_wanted and self._fractions is not None:
            before, ours = self._fractions
            if now == ours:  # else someone has set another one since
                torch.cuda.set_per_process_memory_fraction(before, self.torch_device)
            self._fractions = None

    def native_event(self, event: torch.cuda.Event) -> int:
        return event.cuda_event

    def mark(self) -> _Mark:
        return _Mark(self.current_stream())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def close(self) -> None:
        for stream in self._turns:  # the other of each pair was waited for
            stream.synchronize()
        self._turns.clear()
        if self._of_guard is not None:
            stop_watching_allocator()
            self.leave_free(False)
            self._of_guard = None
