"""Swapping tensor by tensor without a compiler, on a device whose copies run as late as the waits allow."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch

from megatron.swap.tensor_swap.operations import storage_of
from megatron.swap.tensor_swap.swap import TensorSwap
from tests.lazy_device import LazyDevice, LazyStream
from tests.unit.tensor_swap.tensor_cases import HOST_GIB, begin_copies, leave, tensor
from tests.unit.tensor_swap.test_tensor_programs import NoSwap, program


class Device(LazyDevice):
    """Lists what was copied, in bytes, and lets a copy fail when it is enqueued.

    Attributes:
        fails: the numbers of the copies that fail, from 1 on; a part of each is under way on a stream of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.fails: set[int] = set()

    def copy(self, stream: LazyStream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        self.sizes.append(sum(source.numel() for source in sources))
        if len(self.sizes) in self.fails:
            other = self.copy_stream("part")
            super().copy(other, [target[:100] for target in targets], [source[:100] for source in sources])
            raise OSError(28, "no space left")
        return super().copy(stream, targets, sources)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    begin_copies(monkeypatch, "direct")
    made = Device()
    monkeypatch.setattr("megatron.swap.tensor_swap.direct_transfers.EmulatedDevice", lambda: made)
    return made


def fill(given: torch.Tensor, byte: int) -> None:
    """Write the bytes of ``given``, unseen by a ``TensorSwap``, as work of a GPU does that was enqueued before."""
    ctypes.memset(storage_of(given).data_ptr(), byte, storage_of(given).nbytes())


def bytes_in(given: torch.Tensor) -> bytes:
    """Return the bytes of ``given``, unseen by a ``TensorSwap``."""
    return ctypes.string_at(storage_of(given).data_ptr(), storage_of(given).nbytes())


def test_an_offload_that_is_interrupted_has_not_begun(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with TensorSwap(HOST_GIB, "cpu") as swap:
        a, b = tensor(), tensor()
        with monkeypatch.context() as patch:
            patch.setattr(device, "copy", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                swap.swap_out(a)
        assert not swap.is_out(a)
        assert torch.equal(a, b)
        leave(swap, a)
        assert swap.is_out(a)
        assert torch.equal(a, b)


def test_cancel_finds_nothing_to_withdraw(device: Device) -> None:
    with TensorSwap(HOST_GIB, "cpu") as swap:
        a = tensor()
        swap.queue_swap_out(a)
        swap.cancel(a)
        swap.wait_swapped_out()
        assert swap.is_out(a)
        swap.queue_prefetch(a)
        swap.cancel(a)  # noted only
        swap.start_prefetches()
        assert swap.is_out(a)
        swap.queue_prefetch(a)
        swap.start_prefetches()
        swap.cancel(a)
        swap.wait()
        assert not swap.is_out(a)
        assert torch.equal(a, tensor())


def test_nothing_goes_ahead_and_what_left_first_is_free_first(device: Device) -> None:
    with TensorSwap(HOST_GIB, "cpu") as swap:
        a, b, c = tensor(4096), tensor(8192), tensor(16384)
        swap.queue_swap_out(a, b)
        swap.swap_out(c)
        swap.swap_out(a)
        assert device.sizes == [4096, 8192, 16384]
        out, _ = device._streams
        for num_free in range(1, 4):
            for _ in ("wait", "copy", "event"):
                out.work.popleft()()
            torch.ones(1).add_(1)
            assert [swap.is_out(x) for x in (a, b, c)] == [number < num_free for number in range(3)]
        swap.queue_prefetch(a, b)
        swap.start_prefetches()
        assert torch.equal(c, tensor(16384))
        assert device.sizes[3:] == [4096, 8192, 16384]


def test_copies_wait_for_the_callers_stream(device: Device) -> None:
    device.compute = LazyStream("compute")
    with TensorSwap(HOST_GIB, "cpu") as swap:
        a = tensor()
        device.compute.enqueue(lambda: fill(a, 7))
        leave(swap, a)
        assert swap.is_out(a)
        device.compute.enqueue(lambda: fill(a, 8))  # by what had the memory before
        swap.queue_prefetch(a)
        swap.start_prefetches()
        swap.wait()
        device.record(device.compute).synchronize()
        assert bytes_in(a) == b"\7" * (1 << 16)


def test_the_callers_stream_waits_for_a_reload(device: Device) -> None:
    with TensorSwap(HOST_GIB, "cpu") as swap:
        a = tensor()
        expected = bytes_in(a)
        leave(swap, a)
        seen: list[bytes] = []
        device.compute = LazyStream("compute")
        swap.resident(a)
        device.compute.enqueue(lambda: seen.append(bytes_in(a)))
        device.record(device.compute).synchronize()
        assert seen == [expected]


def test_random_programs_race_with_nothing(device: Device) -> None:
    for seed in range(20):
        with TensorSwap(HOST_GIB, "cpu") as swap:
            found = program(seed, swap)
        assert found == program(seed, NoSwap()), f"seed {seed}"
    assert device.violations == []
    assert len(device.sizes) > 50


def test_a_copy_out_that_fails_is_told_to_who_waits_and_the_tensor_stays(device: Device) -> None:
    device.fails = {1}
    with TensorSwap(HOST_GIB, "cpu") as swap:
        a, b = tensor(seed=0), tensor(seed=1)
        swap.swap_out(a)
        swap.swap_out(b)
        with pytest.raises(OSError, match="no space"):
            swap.wait_swapped_out()
        assert [swap.is_out(x) for x in (a, b)] == [False, True]
        swap.wait_swapped_out()
        assert torch.equal(a + b, tensor(seed=0) + tensor(seed=1))
        assert swap.stats.host_bytes == 0
