"""The contract of a device, for every device: a new one adds itself to ``DEVICES``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.swap.common.types import MIB, SwapError
from megatron.swap.devices.base import Device
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from tests.lazy_device import LazyDevice

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICES: dict[str, Callable[[], Device]] = {
    "emulated": lambda: EmulatedDevice(longest_delay_s=0.002, seed=1),
    "lazy": LazyDevice,
    "cuda": CudaDevice,
}


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.gpu, NEEDS_CUDA] if name == "cuda" else []) for name in DEVICES]
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = DEVICES[request.param]()
    yield made
    made.close()


def host_bytes(num_bytes: int, device: Device, seed: int = 0) -> torch.Tensor:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.pin_memory() if device.torch_device.type == "cuda" else data


def arrive(device: Device, stream: object) -> None:
    """Make the compute stream wait for ``stream``, and the test for the compute stream."""
    device.wait(device.current_stream(), device.record(stream))
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize()


class TestContract:
    def test_a_stream_keeps_the_order_of_its_copies(self, device: Device):
        stream = device.copy_stream("in")
        target = device.allocate(1000)
        sources = [host_bytes(1000, device, seed) for seed in range(10)]
        device.wait(stream, device.record(device.current_stream()))
        for source in sources:
            device.copy(stream, [target], [source])
        arrive(device, stream)
        assert torch.equal(target.cpu(), sources[-1])

    def test_an_event_passes_and_stays_passed_and_a_timed_wait_knows_its_length(self, device: Device):
        stream = device.copy_stream("in")
        target, source = device.allocate(1000), host_bytes(1000, device)
        device.copy(stream, [target], [source])
        event = device.record(stream)
        stall = device.timed_wait(device.current_stream(), event)
        arrive(device, stream)
        assert device.has_passed(event)
        device.wait(device.current_stream(), event)
        device.wait(stream, event)
        assert device.has_passed(event)
        assert stall.elapsed_ms() >= 0  # type: ignore[operator]
        assert torch.equal(target.cpu(), source)

    def test_close_waits_for_every_copy_and_may_be_called_twice(self, device: Device):
        stream = device.copy_stream("in")
        pairs = [(device.allocate(1000), host_bytes(1000, device, seed)) for seed in range(5)]
        for target, source in pairs:
            device.copy(stream, [target], [source])
        device.close()
        assert all(torch.equal(target.cpu(), source) for target, source in pairs)
        device.close()

    def test_large_copies_in_one_call(self, device: Device):
        sizes = [40 * MIB, MIB, 70 * MIB + 1]
        sources = [host_bytes(size, device, seed) for seed, size in enumerate(sizes)]
        in_stream, out_stream = device.copy_stream("in"), device.copy_stream("out")
        assert (device.allocate(1).dtype, device.allocate(1).device.type) == (torch.uint8, device.torch_device.type)
        for takes_turns in (True, False) if isinstance(device, CudaDevice) else (True,):
            vars(device)["_takes_turns"] = takes_turns
            there, back = [device.allocate(size) for size in sizes], [host_bytes(size, device, 9) for size in sizes]
            device.wait(in_stream, device.record(device.current_stream()))
            assert device.copy(in_stream, there, sources) in (3, 6)
            device.wait(out_stream, device.record(in_stream))
            device.copy(out_stream, back, there)
            arrive(device, out_stream)
            assert all(torch.equal(one, other) for one, other in zip(back, sources, strict=True))


class TestEmulation:
    @pytest.fixture
    def emulated(self) -> Iterator[EmulatedDevice]:
        device = EmulatedDevice(longest_delay_s=0.001)
        yield device
        device.close()

    def test_memory_given_up_and_memory_made_ready_are_nan(self, emulated: EmulatedDevice):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert emulated.allocate(64).view(dtype).isnan().all()
            tensor = torch.ones(64, dtype=dtype)
            emulated.discard(tensor.untyped_storage())
            assert tensor.isnan().all()

    def test_a_failed_copy_is_raised_by_whoever_waits_also_through_another_stream(self, emulated: EmulatedDevice):
        first, second = emulated.copy_stream("first"), emulated.copy_stream("second")

        def fail() -> None:
            raise OSError("the link is down")

        first.enqueue(fail)
        emulated.wait(second, emulated.record(first))
        event = emulated.record(second)
        for late in (event, emulated.record(first)):
            with pytest.raises(SwapError, match="the link is down"):
                emulated.wait(emulated.current_stream(), late)


class FakeStream:
    """Records which work a stream has waited for: ``done`` counts that of each stream, its own included."""

    def __init__(self, *_: object) -> None:
        self.done: dict[FakeStream, int] = {self: 0}

    def wait_stream(self, other: FakeStream) -> None:
        for stream, number in other.done.items():
            self.done[stream] = max(self.done.get(stream, 0), number)

    def __enter__(self) -> None:
        assert FakeBytes.current is None
        FakeBytes.current = self

    def __exit__(self, *_: object) -> None:
        FakeBytes.current = None


class FakeBytes:
    """A fake tensor of a number of bytes. A copy is work of the current stream."""

    current: FakeStream | None = None
    copies: list[tuple[FakeStream, int]]

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def numel(self) -> int:
        return self.num_bytes

    def split(self, size: int) -> list[FakeBytes]:
        return [FakeBytes(min(size, self.num_bytes - start)) for start in range(0, self.num_bytes, size)]

    def copy_(self, _: FakeBytes, non_blocking: bool) -> None:
        stream = FakeBytes.current
        assert stream is not None
        if FakeBytes.copies:
            before, _ = FakeBytes.copies[-1]
            assert stream.done.get(before, 0) == before.done[before], "a piece does not wait for the one before it"
        stream.done[stream] += 1
        FakeBytes.copies.append((stream, self.num_bytes))


@pytest.mark.parametrize("num_connections", ["8", "1"])
def test_copies_on_a_gpu_take_turns(num_connections: str, monkeypatch: pytest.MonkeyPatch):
    """Copies are ordered as on one stream, and leave breaks for others' copies unless all streams share one queue."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", num_connections)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "made up")
    monkeypatch.setattr(FakeBytes, "copies", [], raising=False)
    device, sizes = CudaDevice(), random.Random(0)
    stream: Any = device.copy_stream("out")
    given: list[int] = []
    num_pieces = 0
    for _ in range(20):
        halves = [sizes.choice([1, 3, 40, 64, 65, 200]) for _ in range(sizes.randint(1, 3))]
        moved: list[Any] = [FakeBytes(half * MIB // 2) for half in halves]
        given += [one.num_bytes for one in moved]
        num_pieces += device.copy(stream, moved, moved)
        last, _ = FakeBytes.copies[-1]
        assert stream.done.get(last, 0) == last.done[last], "who waits for the stream does not wait for the last piece"
    copies = FakeBytes.copies
    assert (sum(size for _, size in copies), len(copies)) == (sum(given), num_pieces)
    if num_connections == "1":
        assert copies == [(stream, size) for size in given]
        return
    assert len({stream for stream, _ in copies}) == 2
    in_a_row, before = 0, None
    for on_stream, size in copies:
        in_a_row = in_a_row + size if on_stream is before else size
        before = on_stream
        assert in_a_row <= 32 * MIB
