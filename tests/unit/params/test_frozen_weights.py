"""Frozen weights in host memory while adapters train: losses, gradients and weights equal to the bit."""

import copy
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from megatron import swap
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.types import GIB
from megatron.swap.devices.base import Device
from megatron.swap.params import weight_buffers
from megatron.swap.params.weight_buffers import Buffer
from megatron.swap.profiling.observer import Observer
from tests.frozen_models import MODELS, Adapted, Model, SelfCheckpointing, check_equal, data, make, one_batch, train
from tests.lazy_device import LazyDevice
from tests.planned_loop import NUM_STEPS, QUIET, check
from tests.weight_models import Far

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def device() -> Iterator[LazyDevice]:
    made = LazyDevice()
    yield made
    made.close()
    assert made.violations == []


@pytest.mark.parametrize("name", MODELS)
def test_as_without(name: str, device: Device) -> None:
    swapped = check_equal(MODELS[name](), device)
    stats = swapped.stats
    assert stats.buffer_peak_bytes == min(2, len(swapped._layers)) * max(layer.num_bytes for layer in swapped._layers)


def two_backwards(model: Model, step: int) -> Iterator[torch.Tensor]:
    losses = [model(data(model, 2 * step + micro)).square().mean() for micro in range(2)]
    for loss in reversed(losses):
        loss.backward()
    yield from losses


def accumulated(model: Model, step: int) -> Iterator[torch.Tensor]:
    for micro in range(2):
        yield from one_batch(model, 2 * step + micro)


def evaluated(model: Model, step: int) -> Iterator[torch.Tensor]:
    loss = model(data(model, step)).square().mean()
    model.eval()
    with torch.no_grad():
        yield model(data(model, 50))
    with torch.inference_mode():
        yield model(data(model, 51))
    model.train()
    loss.backward()
    yield loss


def in_other_orders(model: Model, step: int) -> Iterator[torch.Tensor]:
    model.segments = [((0,), (0,), (1,), (3,), (2,)), ((4,), (1,), (4,), (0,)), ((2,), (2,))][step]
    yield from one_batch(model, step)


def with_errors(model: Model, step: int) -> Iterator[torch.Tensor]:
    """A forward that fails, one that is interrupted, and a backward that fails; then all is as if nothing had been."""
    for error in (ArithmeticError, KeyboardInterrupt):

        def fail(error: type[BaseException] = error) -> None:
            raise error

        model.layers[1].what = fail
        with pytest.raises(error):
            model(data(model, step))

    def fail_too(_: torch.Tensor) -> None:
        raise ArithmeticError

    hidden: list[torch.Tensor] = []
    hook = model.layers[2].register_forward_hook(lambda *_: hidden.append(_[2]))
    loss = model(data(model, step)).square().mean()
    hook.remove()
    hidden[0].register_hook(fail_too)
    with pytest.raises(ArithmeticError):
        loss.backward()
    model.zero_grad()
    yield from one_batch(model, step)


STEPS = [two_backwards, accumulated, evaluated, in_other_orders, with_errors]


@pytest.mark.parametrize("name", ["plain", "checkpoints inside"])
@pytest.mark.parametrize("step", STEPS)
def test_other_steps(step: Any, name: str, device: Device) -> None:
    check_equal(MODELS[name](), device, step)


@pytest.mark.parametrize("name", ["plain", "checkpoints inside"])
def test_activations_are_swapped_too(name: str, device: Device) -> None:
    seen: list[swap.Run] = []

    def activations(model: Model) -> Any:
        seen.append(swap.activations(list(model.layers), "0-3", min_mib=0, cpu_delay_ms=1))
        return seen[0]

    check_equal(MODELS[name](), device, accumulated, activations)
    assert seen[0].stats().out_bytes > 0


def test_hooks_around_get_each_tensor_once(device: Device) -> None:
    model, seen = make(), (list[torch.Size](), list[torch.Size]())
    for to in seen:
        swapping = nullcontext() if to is seen[0] else swap.weights(model, training=True, device=device)
        with swapping, torch.autograd.graph.saved_tensors_hooks(lambda x, to=to: to.append(x.shape) or x, lambda x: x):
            model(data(model, 0))
    assert 0 < len(seen[1]) <= len(seen[0])


@pytest.mark.slow
def test_activations_are_planned_too() -> None:
    """Layers are recomputed whole, in checkpoints of the planner."""
    model, observer = make(), Observer()
    copied = copy.deepcopy(model)
    with observer.context(copied):
        alone = train(copied, num_steps=NUM_STEPS)
    budget_gib = 0.56 * observer.peak_bytes / GIB
    with (
        swap.weights(model, training=True) as swapped,
        swap.activations(model, memory_gib=budget_gib, **QUIET) as activations,
    ):
        assert train(model, num_steps=NUM_STEPS) == alone
        check(activations.stats())
        plan = activations.plan()
    assert "recompute" in plan
    assert swapped.stats.buffer_peak_bytes == 2 * max(layer.num_bytes for layer in swapped._layers)


def test_frozen_layers_between_trained_ones(device: Device) -> None:
    """A layer that is all frozen moves whole, one that is all trained does not move."""
    model = make()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    model.layers[3].requires_grad_(True)
    swapped = check_equal(model, device)
    assert [layer.name for layer in swapped._layers] == ["layers.0", "layers.1", "layers.2", "layers.4"]


def test_bytes_of_a_step() -> None:
    """All layers but the last two come once in forward, all but the first two once in backward."""
    model, device, taken = make(num_layers=7), Far(), []
    (offloaded,) = {sum(p.nbytes for p in (layer.norm.weight, layer.norm.bias, layer.up.weight, layer.up.bias,
                                            layer.down.weight, layer.scale)) for layer in model.layers}  # fmt: skip
    rest = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - 7 * offloaded
    with swap.weights(model, training=True, device=device) as swapped:
        layer_bytes = swapped.stats.buffer_bytes // 2
        assert offloaded <= layer_bytes < offloaded + 6 * 512
        in_bytes: list[int] = []
        for layer in model.layers:
            layer.up.register_full_backward_hook(lambda *_: taken.append(device.taken_bytes))
        train(model, after=lambda: in_bytes.append(swapped.stats.in_bytes))
        assert in_bytes == [(7 + 5) * layer_bytes, (7 + 5 + 10) * layer_bytes, (7 + 5 + 20) * layer_bytes]
        assert swapped.stats.num_late == 0
        assert swapped.stats.buffer_peak_bytes == swapped.stats.buffer_bytes
        assert swapped.stats.stayed_bytes == sum(
            t.nbytes for layer in model.layers for t in (layer.a.weight, layer.b.weight, layer.rotation)
        )
        assert taken == [2 * layer_bytes + rest] * 3 * 7
        assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


@pytest.mark.parametrize(("layer", "run", "num_runs"), [
    (Adapted, Model.run, 1),
    (SelfCheckpointing, partial(checkpoint, use_reentrant=False), 2),  # the outer one stops before the product
    (SelfCheckpointing, partial(checkpoint, use_reentrant=True), 3),
])  # fmt: skip
def test_between_calls_frozen_weights_are_in_host_memory(layer: Any, run: Any, num_runs: int) -> None:
    """A backward leaves them there too. Whenever a layer runs, in any checkpoint, its weights are on the device."""
    model = make(layer)
    model.run = run
    seen: list[bool] = []
    with swap.weights(model, training=True) as swapped:
        host = {layer.region.tensor.untyped_storage()._cdata for layer in swapped._layers if layer.region}

        def is_there(weight: torch.Tensor) -> bool:
            return weight.untyped_storage()._cdata in host

        for one in model.layers:
            one.up.register_forward_pre_hook(lambda up, _: seen.append(is_there(up.weight)))
        train(model)
        assert seen == [False] * (3 * 5 * num_runs)
        assert all(is_there(one.up.weight) for one in model.layers)
        assert not any(is_there(one.a.weight) for one in model.layers)


def second_derivative(model: Model, step: int) -> Iterator[torch.Tensor]:
    """The first backward's own graph saves the weights that the buffers held then."""
    x = data(model, step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    loss = grad.square().mean() * 100
    loss.backward()
    yield loss


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_buffer_that_others_view_is_left_to_them(is_missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_missing:
        monkeypatch.setattr(Buffer, "is_viewed", False)
    device = LazyDevice()
    swapped = check_equal(make(), device, second_derivative, is_equal=not is_missing)
    assert (swapped.stats.buffer_peak_bytes > 2 * max(layer.num_bytes for layer in swapped._layers)) is not is_missing
    assert device.violations == []


@pytest.mark.parametrize("name", ["plain", "checkpoints inside"])
def test_a_missing_wait_in_backward_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = LazyDevice()
    wait, stall = device.timed_wait, device.timed_wait(device.compute, device.record(device.compute))
    monkeypatch.setattr(device, "timed_wait", lambda *args: stall if weight_buffers.in_backward() else wait(*args))
    check_equal(MODELS[name](), device, is_equal=False)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(("layer", "start"), [(Adapted, "cpu"), (SelfCheckpointing, "cuda")])
def test_a_model_larger_than_what_is_allowed(layer: Any, start: str) -> None:
    num_layers, width = 12, 2048
    model = make(layer, num_layers, width=width).cuda()
    offloaded_bytes = sum(p.nbytes for p in model.layers.parameters() if not p.requires_grad)
    layer_bytes = offloaded_bytes // num_layers
    rest_bytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) - offloaded_bytes
    alone = train(copy.deepcopy(model))
    alone.weights = [weight.cpu() for weight in alone.weights]  # else they count below
    model.to(start)
    with swap.weights(model, training=True) as swapped:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        together = train(model)
        # Two layers, what stays with its gradients and optimizer state, small activations, and cuBLAS's workspaces.
        assert torch.cuda.max_memory_allocated() < 3 * layer_bytes + 2 * rest_bytes < offloaded_bytes
        assert swapped.stats.buffer_peak_bytes == swapped.stats.buffer_bytes
        assert swapped.stats.num_late == 0
    assert all(tensor.device.type == start for tensor in (*model.parameters(), *model.buffers()))
    together.weights = [weight.cpu() for weight in together.weights]
    assert together == alone
