"""Swapping tensor by tensor without a compiler, on a device whose copies run as late as the waits allow."""

import ctypes

import pytest
import torch

from megatron.swap.tensor_swap.operations import storage_of
from megatron.swap.tensor_swap.swap import TensorSwap
from tests.lazy_device import LazyDevice, LazyStream
from tests.unit.tensor_swap.tensor_cases import HOST_GIB, begin_copies, leave, tensor
from tests.unit.tensor_swap.test_tensor_programs import NoSwap, program


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    begin_copies(monkeypatch, "direct")
    made = LazyDevice()
    monkeypatch.setattr("megatron.swap.tensor_swap.direct_transfers.EmulatedDevice", lambda: made)
    return made


def fill(given: torch.Tensor, byte: int) -> None:
    """Write the bytes of ``given``, unseen by a ``TensorSwap``, as work of a GPU does that was enqueued before."""
    ctypes.memset(storage_of(given).data_ptr(), byte, storage_of(given).nbytes())


def bytes_in(given: torch.Tensor) -> bytes:
    """Return the bytes of ``given``, unseen by a ``TensorSwap``."""
    return ctypes.string_at(storage_of(given).data_ptr(), storage_of(given).nbytes())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failed_offload(error: type[BaseException], device: LazyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    with TensorSwap(HOST_GIB, "cpu") as swap:
        a, b = tensor(), tensor()
        with monkeypatch.context() as patch:
            patch.setattr(device, "copy", lambda *_: (_ for _ in ()).throw(error()))
            with pytest.raises(error):
                leave(swap, a)
        assert not swap.is_out(a)
        assert torch.equal(a, b)
        leave(swap, a)
        assert swap.is_out(a)
        assert torch.equal(a, b)


def test_after_a_copy_that_fails_halfway_nothing_is_under_way(
    device: LazyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def fails(stream: LazyStream, *_: object) -> None:
        stream.enqueue(lambda: ran.append("the first piece"))
        raise OSError

    with TensorSwap(HOST_GIB, "cpu") as swap:
        a = tensor()
        leave(swap, a)
        device.compute = LazyStream("compute")
        with monkeypatch.context() as patch:
            patch.setattr(device, "copy", fails)
            with pytest.raises(OSError):
                swap.resident(a)
        assert ran == ["the first piece"], "before the memory of either side is used again"


def test_copies_wait_for_the_callers_stream(device: LazyDevice) -> None:
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


def test_the_callers_stream_waits_for_a_reload(device: LazyDevice) -> None:
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


def test_random_programs_race_with_nothing(device: LazyDevice) -> None:
    for seed in range(20):
        with TensorSwap(HOST_GIB, "cpu") as swap:
            found = program(seed, swap)
        assert found == program(seed, NoSwap()), f"seed {seed}"
    assert device.violations == []
    assert sum(device.num_copies.values()) > 50
