"""Weights in host memory: outputs equal to the bit, two layers on the device, everything restored at the end."""

import copy
import ctypes
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.common.types import SwapError
from megatron.swap.devices.base import Device
from tests.lazy_device import LazyDevice, LazyStream
from tests.weight_models import MODELS, Far, mlp, num_hooks, picture, tied


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, torch.no_grad) for name in MODELS), ("tied", torch.inference_mode)]
)
def test_as_without(name: str, mode: Any, device: Device) -> None:
    model, x = MODELS[name]()
    model.eval()
    before = picture(model)
    with mode():
        expected = model(x)
        with swap.weights(model, layers=model.layers, device=device) as swapped:
            for _ in range(4):
                assert torch.equal(model(x), expected)
            assert swapped.stats.num_late == 0
        assert torch.equal(model(x), expected)
    assert picture(model) == before
    assert num_hooks(model) == 0


@pytest.mark.parametrize("orders", [
    pytest.param([[0, 1, 0, 2, 3, 0, 4]] * 4, id="a layer in several places"),
    pytest.param([[0, 1, 2, 3, 4], [0, 1, 3, 4], [0, 4], [], [0, 1, 2, 3, 4], [2]], id="skipped"),
    pytest.param([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 4, 2, 0, 3], [0, 1, 2, 3, 4]], id="other orders"),
])  # fmt: skip
def test_any_order(orders: list[list[int]], device: Device) -> None:
    model, x = mlp()
    model.eval()
    with torch.no_grad(), swap.weights(model, model.layers, device=device) as swapped:
        results = []
        for order in orders:
            model.order = order
            results.append(model(x))
        late = swapped.stats.num_late
    for order, result in zip(orders, results, strict=True):
        model.order = order
        with torch.no_grad():
            assert torch.equal(model(x), result)
    assert late <= 2 * len(orders) * len(model.order)


def test_the_order_is_learned_in_one_pass() -> None:
    model, x = mlp()
    model.eval()
    model.order = [4, 1, 0, 1, 3, 2, 1]
    with torch.no_grad(), swap.weights(model, model.layers) as swapped:
        model(x)
        assert swapped.stats.num_late > 3
        model(x)  # how the pass begins after its own end is learned here
        late = swapped.stats.num_late
        for _ in range(3):
            model(x)
        assert swapped.stats.num_late == late


class Counting(nn.Module):
    """A layer that has a cache, as some models do, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(2, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache += self.linear(x)
        return torch.tanh(self.cache)


def test_a_layer_that_writes_to_its_buffers(device: Device) -> None:
    model = nn.Sequential(*(Counting() for _ in range(4))).eval()
    alone = copy.deepcopy(model)
    x = torch.randn(2, 16)
    with torch.no_grad(), swap.weights(model, model, device=device) as swapped:
        for _ in range(4):
            assert torch.equal(model(x), alone(x))
        layer_bytes = swapped.stats.buffer_bytes // 2
        assert swapped.stats.out_bytes == 4 * 4 * layer_bytes
        assert swapped.stats.in_bytes == (4 * 4 + 1) * layer_bytes  # what was written is there: it is not copied
        for _ in range(2):
            assert torch.equal(model[3](x), alone[3](x))
        assert swapped.stats.in_bytes == (4 * 4 + 1) * layer_bytes
    with torch.no_grad():
        assert torch.equal(model(x), alone(x))


class Kernel(nn.Module):
    """A kernel that reads its weight when ``stream`` reaches it. It has its address, and keeps no memory alive."""

    def __init__(self, value: int, stream: LazyStream, seen: list[list[float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float(value)))
        self.read = lambda data: stream.enqueue(partial(self.read_at, data.data_ptr(), seen))

    @staticmethod
    def read_at(address: int, seen: list[list[float]]) -> None:
        seen.append(list((ctypes.c_float * 4).from_address(address)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.read(self.weight.data)
        return x


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_copy_waits_for_compute_that_lags(is_missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are enqueued and run when the host is far ahead, as on a GPU. Copies run as early as they may."""
    device, compute, seen = LazyDevice(), LazyStream("compute"), list[list[float]]()
    device.compute = compute
    if is_missing:
        monkeypatch.setattr(device, "wait", lambda stream, event: None)
    model = nn.Sequential(*(Kernel(value, compute, seen) for value in range(5))).eval()
    with torch.no_grad(), swap.weights(model, model, device=device):
        (in_stream,) = device._streams
        for layer in [*model] * 3:
            layer(torch.zeros(1))
            in_stream.run_until(lambda: not in_stream.work)
        compute.run_until(lambda: not compute.work)
    assert (seen == [[float(value)] * 4 for value in [*range(5)] * 3]) is not is_missing


@pytest.mark.parametrize("is_missing", [False, True])
def test_compute_waits_for_copies(is_missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs copies as late as it may."""
    device = LazyDevice()
    model, x = mlp()
    model.eval()
    if is_missing:
        stall = device.timed_wait(device.compute, device.record(device.compute))
        monkeypatch.setattr(device, "timed_wait", lambda stream, event: stall)
    with torch.no_grad():
        expected = model(x)
        with swap.weights(model, model.layers, device=device):
            assert torch.equal(model(x), expected) is not is_missing


def test_the_device_has_two_layers_and_what_stays() -> None:
    device = Far()
    model, x = tied()
    model.eval()
    layer_bytes = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    alone = weakref.ref(model.layers[2].linear2.weight.untyped_storage())
    with torch.no_grad(), swap.weights(model, model.layers, device=device) as swapped:
        assert alone() is None  # where it was is free
        stats = swapped.stats
        shared_bytes = model.layers[0].self_attn.out_proj.weight.nbytes
        assert stats.stayed_bytes == shared_bytes
        stay_bytes = shared_bytes + model.first.weight.nbytes + model.last.bias.nbytes
        assert stats.buffer_bytes == 2 * max(layer.num_bytes for layer in swapped._layers)
        assert max(layer_bytes) <= stats.buffer_bytes // 2 < max(layer_bytes) + 512 * 12
        assert device.taken_bytes == stats.buffer_bytes + stay_bytes
        assert stats.host_bytes % 4096 == 0
        assert sum(layer_bytes) - 2 * shared_bytes <= stats.host_bytes
        for _ in range(3):
            model(x)
            assert device.taken_bytes == stats.buffer_bytes + stay_bytes
    gc.collect()
    assert device.taken_bytes == 0
    assert swapped.stats.host_bytes == swapped.stats.buffer_bytes == 0


def test_nothing_grows_over_many_passes() -> None:
    model, x = mlp(3)
    model.eval()

    def count() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    with torch.no_grad(), swap.weights(model, model.layers) as swapped:
        model(x)
        before = count()
        for _ in range(50):
            model(x)
        assert count() == before
        assert len(swapped._buffers.counters._stalls) <= 1
        assert len(swapped._buffers._after) <= 6


def test_without_room_for_the_buffers_all_is_as_it_was() -> None:
    model, _ = mlp()
    before = picture(model.eval())
    with pytest.raises(torch.OutOfMemoryError):
        swap.weights(model, model.layers, device=Far(room_bytes=2048))
    assert picture(model) == before
    assert num_hooks(model) == 0


@pytest.mark.parametrize("has_room", [True, False])
def test_buffers_make_room_for_what_comes_back_and_what_has_none_is_on_the_cpu(has_room: bool) -> None:
    model, x = mlp()
    model.eval()
    device = Far()
    device.torch_device = torch.device("cpu")  # the model is on it
    with torch.no_grad():
        expected = model(x)
        swapped = swap.weights(model, model.layers, device=device)
        model(x)
        device.room_bytes = sum(p.nbytes for p in model.layers.parameters()) * has_room
        if has_room:
            swapped.close()
            assert device.taken_bytes == device.room_bytes
        else:
            with pytest.raises(SwapError, match=r"have no room on cpu any more and are on the CPU"):
                swapped.close()
        swapped.close()
        assert num_hooks(model) == 0
        assert torch.equal(model(x), expected)
