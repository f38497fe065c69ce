"""Optimizer state on disk, all of it or a part: equal to the plain optimizer, also with a slow disk. A fault ends
training, and memory falls."""

import errno
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.swap.common.disk_buffers import NUM_STAGED
from megatron.swap.common.types import KIB, MIB
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.megatron_lm.optimizer_swap import OffloadSettings, OptimizerSwap
from megatron.swap.memory.disk_file import BLOCK_BYTES, DiskError, DiskFile, DiskRoom
from megatron.swap.memory.staging import with_padding
from megatron.swap.optimizer.param_state import OffloadedTensor, ParamState
from tests.sizes import sized
from tests.unit.optimizer.test_stepper import OPTIMIZERS, Training, same

BUCKET = {"bucket_bytes": 16 * KIB}
LIMITS = {"all on disk": 560 * KIB, "a part on disk": 640 * KIB}
"""Limits of host memory, with seven buffers between disk and device. They hold less than all of the state."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFile]:
    made = DiskFile(tmp_path, 64 * MIB)
    yield made
    made.close()


def on_disk(training: Training) -> int:
    """Return the bytes of state that are offloaded to disk."""
    assert training.stepper is not None
    tensors = training.stepper.state.offloaded_tensors()
    return sum(one.num_bytes for one in tensors if isinstance(one.backing, DiskRoom))


@pytest.mark.parametrize(
    ("name", "limit", "with_main"),
    [("adamw", "all on disk", False), ("adamw", "a part on disk", True), ("momentum", "all on disk", True)],
)
def test_as_the_optimizer_alone(name: str, limit: str, with_main: bool, disk: DiskFile) -> None:
    make = OPTIMIZERS[name]
    swapped = Training(make, lambda _: True, with_main=with_main, limit_bytes=LIMITS[limit], disk=disk, **BUCKET)
    alone = Training(make)
    for _ in range(3):  # materialized and released in between
        assert same(swapped.steps(3).all(), alone.steps(3).all())
    assert swapped.stepper is not None
    if limit == "all on disk":
        assert on_disk(swapped) == swapped.stepper.state.offloaded_bytes
    else:
        assert 0 < on_disk(swapped) < swapped.stepper.state.offloaded_bytes


@pytest.mark.parametrize(("seed", "bucket_bytes"), [(0, 16 * KIB), (1, 64 * KIB), (2, 256 * KIB)][: sized(3)])
def test_a_slow_disk_changes_nothing(
    seed: int, bucket_bytes: int, disk: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write may be in flight when its bytes are read or written again (few buckets). Reads end in any order, and a
    call may move fewer bytes than asked."""
    delays, read, write = random.Random(seed), os.preadv, os.pwritev

    def slow(call: Any) -> Any:
        def run(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            time.sleep(delays.choice([0, 0, 0.002, 0.004, 0.03]))
            return call(descriptor, [buffers[0][: delays.randint(1, 4) * BLOCK_BYTES]], offset)

        return run

    monkeypatch.setattr(os, "preadv", slow(read))
    monkeypatch.setattr(os, "pwritev", slow(write))
    make = OPTIMIZERS["adamw"]
    limit_bytes = NUM_STAGED * with_padding(bucket_bytes)  # buffers alone
    swapped = Training(make, lambda _: True, limit_bytes=limit_bytes, disk=disk, bucket_bytes=bucket_bytes)
    assert same(swapped.steps(4).all(), Training(make).steps(4).all())
    assert swapped.stepper is not None
    assert on_disk(swapped) == swapped.stepper.state.offloaded_bytes


def a_param_state(number: int, disk: DiskFile | None = None) -> ParamState:
    """Return a parameter's state: one MiB in host memory, and two more there or on disk."""
    param_state = ParamState(torch.full((1024, 256), float(number)))
    for name in ("main", "exp_avg", "exp_avg_sq"):
        backing = torch.empty(MIB, dtype=torch.uint8) if disk is None or name == "main" else disk.take_all([MIB])[0]
        param_state.tensors[name] = OffloadedTensor(param_state.param, backing)
    return param_state


def test_state_on_disk_is_the_first_to_be_kept(disk: DiskFile) -> None:
    """Ten of twelve parameters are offloaded; the middle four of them are on disk."""
    param_states = [a_param_state(number, disk if 3 <= number < 7 else None) for number in range(10)]
    offloaded: set[torch.Tensor] = set()
    swap = OptimizerSwap(EmulatedDevice(), OffloadSettings(1.0, 64 * MIB, disk=disk))
    stepper = SimpleNamespace(
        state=SimpleNamespace(param_states=param_states), set_offloaded=offloaded.update, update_ms=lambda: 10.0
    )
    swap._adapted = [SimpleNamespace(stepper=stepper, requantized_bytes=lambda: 0)]  # type: ignore[list-item]
    swap._selection.seen_bytes, swap._selection.offloaded_bytes = 12 * MIB, 10 * MIB
    disk.traffic.take_ms_per_gib = lambda: 1e3  # type: ignore[method-assign]
    found = swap.offloaded_state()
    assert (found.state_gib, found.fraction) == (pytest.approx(36 / 1024), pytest.approx(10 / 12))
    assert (found.disk_gib, found.disk_ms) == (pytest.approx(12 / 1024), pytest.approx(2 * 8 * 1e3 / 1024))
    for fraction, wanted in (
        (1.0, range(10)), (9 / 12, {0, 1, 2, 4, 5, 6, 7, 8, 9}), (6 / 12, {0, 1, 2, 7, 8, 9}), (3 / 12, {1, 7, 9}),
    ):  # fmt: skip
        offloaded.clear()
        swap.set_offload_fraction(fraction)
        assert {int(param[0, 0]) for param in offloaded} == set(wanted)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails_ends_training_and_no_checkpoint_is_made_of_it(
    call: str, disk: DiskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_bytes = LIMITS["all on disk"]
    swapped = Training(OPTIMIZERS["adamw"], lambda _: True, limit_bytes=limit_bytes, disk=disk, **BUCKET).steps(2)

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(DiskError, match="A checkpoint that was saved is intact"):
        swapped.steps(1).all()  # materializes it, as Megatron does before it saves
