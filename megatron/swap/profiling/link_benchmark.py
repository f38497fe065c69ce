"""How fast copies to host memory and back are here, while every rank of the run copies: what a plan has to go by.

The link's speed is no property of a GPU: ranks of a host share its memory and its buses. So all ranks time the same
pattern at the same moment: copies out, copies in, both at once. Each step ends with all ranks telling whether it went
well; what fails on one ends the measurement on all, and nobody waits for a rank that has given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from megatron.swap.common.types import MIB, SwapError
from megatron.swap.devices.base import Device, Event, Stream
from megatron.swap.memory.tiers.base import Slot, Tier
from megatron.swap.planner.profile import Link

COPY_BYTES = 128 * MIB
NUM_COPIES = 4
"""One after the other, as a layer's are: together long enough that launching and looking do not count (a tenth with one
copy), short enough for a fraction of a second in all."""

SMALLEST_BYTES = MIB
"""Of a copy, where memory is short: quarters are tried down to that."""

REPETITIONS = 3

Directions = tuple[str, ...]
OUT: Directions = ("out",)
IN: Directions = ("in",)
BOTH: Directions = ("out", "in")


def measure_link(device: Device, tier: Tier, num_bytes: int = COPY_BYTES) -> Link:
    """This rank's link, in GB/s, as the median of ``REPETITIONS``. Every rank must call it; see ``slowest_link``.

    Call it while no copy is under way: before the first step, or when the device is through with one. It takes
    ``2 * num_bytes`` of the device and of the tier, and gives them back.

    Args:
        num_bytes: of one copy; the same on all ranks. Where one of them has no memory for it, a quarter is tried.

    Raises:
        SwapError: a copy, or the memory for it, failed on any rank; raised on all ranks.
    """
    ends = _Ends(device, tier, num_bytes)
    try:
        try:
            _on_all_ranks(device, ends.take)
        except SwapError:
            if num_bytes // 4 < SMALLEST_BYTES:
                raise
            ends.free()
            return measure_link(device, tier, num_bytes // 4)
        seconds = {
            directions: [_on_all_ranks(device, partial(ends.seconds, directions)) for _ in range(REPETITIONS)]
            for directions in (OUT, IN, BOTH)
        }
    finally:
        ends.free()

    def gb_s(directions: Directions, which: str) -> float:
        return NUM_COPIES * num_bytes / median(times[which] for times in seconds[directions]) / 1e9

    return Link(gb_s(OUT, "out"), gb_s(IN, "in"), gb_s(BOTH, "out"), gb_s(BOTH, "in"))


def slowest_link(device: Device, link: Link) -> Link:
    """Of the links of all ranks, the lowest figures: ranks wait for each other, so a plan goes by these."""
    if _num_ranks() == 1:
        return link
    figures = torch.tensor(list(vars(link).values()), dtype=torch.float64, device=device.torch_device)
    torch.distributed.all_reduce(figures, torch.distributed.ReduceOp.MIN)
    return Link(*figures.tolist())


class _Ends:
    """Where the copies go from and to: for each direction a slot of the tier and as much memory of the device."""

    def __init__(self, device: Device, tier: Tier, num_bytes: int) -> None:
        self._device = device
        self._tier = tier
        self._num_bytes = num_bytes
        self._slots: dict[str, Slot] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[str, Stream] = {}

    def take(self) -> None:
        """Have the memory, and use it for the first time."""
        for direction in BOTH:
            self._slots[direction] = self._tier.reserve(self._num_bytes)
            self._buffers[direction] = self._device.allocate(self._num_bytes)
            self._streams[direction] = self._device.copy_stream(direction)
        self.seconds(BOTH)

    def seconds(self, directions: Directions) -> dict[str, float]:
        """How long ``NUM_COPIES`` in each of ``directions`` take when they begin together."""
        compute = self._device.current_stream()
        ready = self._device.record(compute)  # a buffer may be recycled memory
        began = time.perf_counter()
        waiting: dict[str, Event] = {}
        for direction in directions:
            stream = self._streams[direction]
            self._device.wait(stream, ready)
            copy = self._tier.write if direction == "out" else self._tier.read
            for _ in range(NUM_COPIES):
                copy(self._device, stream, self._slots[direction], self._buffers[direction])
            waiting[direction] = self._device.record(stream)
        taken: dict[str, float] = {}
        while len(taken) < len(waiting):
            for direction, event in waiting.items():
                if direction not in taken and self._device.has_passed(event):
                    taken[direction] = time.perf_counter() - began
            time.sleep(0)  # the emulation's copies run on threads of this process
        for event in waiting.values():
            self._device.wait(compute, event)  # it has passed; a copy that failed raises here
        return taken

    def free(self) -> None:
        """Give all of it back, when every copy is over."""
        for stream in self._streams.values():
            event = self._device.record(stream)
            while not self._device.has_passed(event):
                time.sleep(0)
        for slot in self._slots.values():
            slot.free()
        self._slots.clear()
        self._buffers.clear()


def _on_all_ranks[T](device: Device, work: Callable[[], T]) -> T:
    """``work`` on every rank, begun together if the ranks have just met; all of them raise if one did."""
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    if _num_ranks() > 1:
        failed = torch.tensor([int(failure is not None)], device=device.torch_device)
        torch.distributed.all_reduce(failed)
        if failure is None and failed.item():
            raise SwapError("the link was not measured: copies failed on another rank; its own message says why.")
    if failure is not None:
        raise SwapError(f"the link was not measured: {failure}") from failure
    return result  # type: ignore[return-value]


def _num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
