"""Speed of copies between device and host memory while all ranks of the run copy at once.

Ranks of a host share memory and buses, so the speed of a single GPU says too little. All ranks time the same pattern at
the same moment: copies out, copies in, both. A failure on one rank ends the benchmark on all ranks.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from megatron.swap.common.collectives import rank_and_world_size
from megatron.swap.common.types import MIB, SwapError
from megatron.swap.devices.base import Device, Event, Stream
from megatron.swap.memory.tiers.base import Slot, Tier
from megatron.swap.planner.profile import Link

COPY_BYTES = 128 * MIB
NUM_COPIES = 4
"""Copies in a row. Launching and polling cost a tenth of a single copy's time, and next to nothing of four."""

EMULATED_COPY_BYTES = 16 * MIB
"""``COPY_BYTES`` on an emulated device, where 7 GiB of copies would take a CPU a second of each run."""

SMALLEST_BYTES = MIB  # sizes are quartered down to this where memory is short

REPETITIONS = 3

Directions = tuple[str, ...]
T = TypeVar("T")
OUT: Directions = ("out",)
IN: Directions = ("in",)
BOTH: Directions = ("out", "in")


def measure_link(device: Device, tier: Tier, num_bytes: int | None = None) -> Link:
    """Return the speed of this rank's link in GB/s, the median of ``REPETITIONS``. Every rank must call this function.

    Call it while no copy is under way. Device and tier each lend ``2 * num_bytes`` for the call. Raises ``SwapError``
    on all ranks if a copy or an allocation failed on any rank.
    """
    if num_bytes is None:
        num_bytes = COPY_BYTES if device.keeps_time else EMULATED_COPY_BYTES
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
    """Return the lowest speeds of all ranks, which wait for each other."""
    if rank_and_world_size()[1] == 1:
        return link
    figures = torch.tensor(list(vars(link).values()), dtype=torch.float64, device=device.torch_device)
    torch.distributed.all_reduce(figures, torch.distributed.ReduceOp.MIN)
    return Link(*figures.tolist())


class _Ends:
    """For each direction a slot of the tier, a device buffer and a stream."""

    def __init__(self, device: Device, tier: Tier, num_bytes: int) -> None:
        self._device = device
        self._tier = tier
        self._num_bytes = num_bytes
        self._slots: dict[str, Slot] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[str, Stream] = {}

    def take(self) -> None:
        for direction in BOTH:
            self._slots[direction] = self._tier.reserve(self._num_bytes)
            self._buffers[direction] = self._device.allocate(self._num_bytes)
            self._streams[direction] = self._device.copy_stream(direction)
        self.seconds(BOTH)  # first uses are slower than later ones, so a first round is not timed

    def seconds(self, directions: Directions) -> dict[str, float]:
        """Return the seconds of ``NUM_COPIES`` in each of ``directions``, which begin together."""
        compute = self._device.current_stream()
        # Copies wait for compute: a buffer may be recycled memory that a kernel still uses.
        ready = self._device.record(compute)
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
            time.sleep(0)  # let the copy threads of the emulated device run
        for event in waiting.values():
            # The event has passed, so the wait costs nothing. It raises if the copy failed.
            self._device.wait(compute, event)
        return taken

    def free(self) -> None:
        for stream in self._streams.values():
            event = self._device.record(stream)  # no memory may go while a copy still reads or writes it
            while not self._device.has_passed(event):
                time.sleep(0)
        for slot in self._slots.values():
            slot.free()
        self._slots.clear()
        self._buffers.clear()


def _on_all_ranks(device: Device, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank, and raise on all ranks if it failed on one."""
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    # Every rank takes part, so none waits for a failed one. The collective also makes all ranks begin together.
    if rank_and_world_size()[1] > 1:
        failed = torch.tensor([int(failure is not None)], device=device.torch_device)
        torch.distributed.all_reduce(failed)
        if failure is None and failed.item():
            raise SwapError("the link was not measured: copies failed on another rank; its own message says why.")
    if failure is not None:
        raise SwapError(f"the link was not measured: {failure}") from failure
    return result  # type: ignore[return-value]
