"""Activations on disk where host memory is short: equal to the bit, also with a slow disk; missing waits are found, and
a failing disk ends training."""

import errno
import os
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from megatron.swap.common.types import KIB
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.disk_file import DiskError, DiskFile
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.disk import DiskSlot, DiskTier
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.memory.tiers.spill import SpillTier
from tests.engine import (
    Engine,
    Step,
    compare,
    interleaved,
    one_forward_one_backward,
    stack,
    train_step,
)
from tests.sizes import sized

NUM_LAYERS = 6
SCHEDULES: dict[str, tuple[Sequence[Step], Sequence[int]]] = {
    "pipeline": (one_forward_one_backward(4), [NUM_LAYERS]),
    "interleaved": (interleaved(4), [3, 3]),
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay reads and writes, so that they end in any order."""
    delays, calls = random.Random(1), {name: getattr(os, name) for name in ("preadv", "pwritev")}

    def slowly(name: str, *arguments: Any) -> int:
        time.sleep(delays.uniform(0, 0.002))
        return int(calls[name](*arguments))

    for name in calls:
        monkeypatch.setattr(os, name, partial(slowly, name))


def run_of(schedule: str) -> Any:
    steps, chunks = SCHEDULES[schedule]
    return partial(train_step, schedule=steps, chunks=chunks)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_is_equal(schedule: str, disk: DiskFile) -> None:
    chunks = SCHEDULES[schedule][1]
    compare(stack(NUM_LAYERS), run_of(schedule), 3, host_bytes=4 * KIB, disk=disk, chunks=chunks, verify=True)
    assert disk.reserved_bytes > 0


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_ends_training(call: str, disk: DiskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, run = stack(NUM_LAYERS), run_of("pipeline")
    with Engine(layers, host_bytes=4 * KIB, disk=disk):
        run(layers)

        def fails(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, call, fails)
        with pytest.raises(DiskError, match="A checkpoint that was saved is intact"):
            run(layers)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("seed", range(sized(3, 2)))
def test_slots_in_any_order(seed: int, disk: DiskFile) -> None:
    """Space is used again at once, by storages of other sizes, while old writes are in flight."""
    chance, device = random.Random(seed), EmulatedDevice(longest_delay_s=0.003)
    tier = DiskTier(disk, 8 * KIB, pinned=False)
    out_stream, in_stream = device.copy_stream("out"), device.copy_stream("in")
    live: list[tuple[Any, torch.Tensor, Any]] = []
    reads: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(60):
        if len(live) < 2 or chance.random() < 0.55:
            source = torch.full((chance.choice([1, 4096, 5000, 20_000, 33_000]),), number % 251, dtype=torch.uint8)
            slot = tier.reserve(source.numel())
            device.wait(out_stream, device.record(device.current_stream()))
            tier.write(device, out_stream, slot, source)
            live.append((slot, source, device.record(out_stream)))
        if chance.random() < 0.3:
            tier.expect(slot for slot, _, _ in chance.sample(live, len(live)))
        if chance.random() < 0.5:
            slot, source, event = live.pop(chance.randrange(len(live)))
            if chance.random() < 0.8:
                target = device.allocate(source.numel())
                device.wait(in_stream, event)
                tier.read(device, in_stream, slot, target)
                reads.append((target, source))
            slot.free()
    device.wait(device.current_stream(), device.record(in_stream))
    device.close()
    assert all(torch.equal(target, source) for target, source in reads)
    for slot, _, _ in live:
        slot.free()
    stats = tier.stats()
    assert stats.leased_bytes == 0
    assert sum(stop - start for _, start, stop in tier._free) == stats.reserved_bytes
    tier.close()


def test_room_on_disk_where_host_memory_has_some_again(disk: DiskFile) -> None:
    """The fraction of a step that goes to disk is the fraction that had no room in the step before."""
    pool = HostPool(limit=8 * KIB, slab_bytes=8 * KIB, pinned=False)
    tier = SpillTier(HostTier(pool), DiskTier(disk, 4 * KIB, pinned=False))
    there = [["host", "host", "disk", "disk"], ["host", "disk", "host", "disk"], ["host", "disk"], ["host", "host"]]
    for expected in there:
        slots = [tier.reserve(4 * KIB) for _ in expected]
        assert ["disk" if isinstance(slot, DiskSlot) else "host" for slot in slots] == expected
        for slot in slots:
            slot.free()
    assert tier.stats().disk_peak_bytes == 8 * KIB
    tier.close()
