"""Inference with a model whose weights exceed the device: its layers' weights are offloaded, and prefetched one ahead.

While a layer computes, a copy stream prefetches the weights of the next one into the other of two device buffers that
take turns. ZeRO-Inference (DeepSpeed), FlexGen and accelerate, among others, stream weights through a device layer by
layer. Here each layer is one copy, and the order in which layers run is learned.

Parameters and buffers stay the same objects. ``tensor.data = …`` points them to host memory, and to a device buffer
while their layer runs. So code that reads them between two calls (``state_dict``) sees the values, on the CPU;
writes (``load_state_dict``) are detected by the tensors' version counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron.swap.common.counters import Counters
from megatron.swap.common.types import GIB, MOST, SwapError, UsageError, format_bytes, is_within
from megatron.swap.devices.base import Device, Event
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.host_memory import (
    HostMemoryError,
    PinStrategy,
    gpu_numa_node,
    local_world_size,
    prepare_regions,
    safe_host_bytes,
)
from megatron.swap.nn.packed_weights import LEAVE_OUT, Block, Layer, find_blocks, is_view_of, named_layers

NUM_BUFFERS = 2
"""One holds the weights of the layer that computes while the other is filled."""


@dataclass(frozen=True)
class WeightStats:
    """Bytes copied since the start, and the memory of the weights.

    Attributes:
        in_bytes: copied to the device.
        out_bytes: copied back, for layers that wrote to their weights or buffers.
        num_late: calls of layers that were not prefetched, because they were not predicted.
        wait_ms: time that compute waited for copies, as far as the device has run.
        host_bytes: host memory, in whole pages.
        buffer_bytes: device memory of the buffers.
        stayed_bytes: weights of these layers that stay on the device, because other modules share them.
    """

    in_bytes: int
    out_bytes: int
    num_late: int
    wait_ms: float
    host_bytes: int
    buffer_bytes: int
    stayed_bytes: int


def weights(
    module: nn.Module, layers: Iterable[nn.Module], *, host_gib: float | None = None, device: Device | None = None
) -> WeightSwap:
    """Offload the weights of ``layers`` to host memory, until the end of the ``with``, or ``close``.

    Args:
        module: the model, in eval mode, called under ``torch.no_grad()`` or ``torch.inference_mode()``. Its weights are
            on the device or on the CPU. Weights outside ``layers``, or shared with modules outside, are moved to the
            device if they are not there, and stay.
        layers: modules of the model, none inside another, in the order in which they first run. Later the order is
            learned from their calls.
        host_gib: most host memory in GiB. Default: what is safe to take, plus what these weights occupy on the CPU now.
        device: default: the current CUDA device; its emulation without CUDA.

    Raises:
        UsageError: this cannot work; nothing is changed.
        HostMemoryError: the weights do not fit host memory; nothing is changed.
        torch.OutOfMemoryError: two layers and the weights that stay do not fit the device; nothing is changed.
    """
    return WeightSwap(module, layers, host_gib=host_gib, device=device)


@dataclass(eq=False)
class _Buffer:
    """Device memory for one layer.

    Attributes:
        memory: uint8, as long as the largest layer.
        read: passes when compute has finished with the memory; copies into it wait for that.
        filled: passes when the copy of ``layer`` is complete; compute waits for that.
        layer: the layer whose weights are here, or are being copied here.
        versions: version counters of its weights when they were copied.
        in_use: ``layer`` is running, and its weights point here.
    """

    number: int
    memory: torch.Tensor
    read: Event
    filled: Event
    layer: Layer | None = None
    versions: list[int] = field(default_factory=list)
    in_use: bool = False


class WeightSwap:
    """Offloaded weights of a model. Made by ``weights``; a context that yields itself.

    Not thread-safe: one call of the model at a time. Host memory and buffers live until ``close``, which waits for the
    device before it releases them. A layer that was interrupted (``KeyboardInterrupt``) keeps its buffer until it or
    the model is called again.
    """

    def __init__(
        self, module: nn.Module, layers: Iterable[nn.Module], *, host_gib: float | None, device: Device | None
    ) -> None:
        chosen = named_layers(module, layers)
        _check_unswapped(module)
        self._owns_device = device is None
        self._device = device or (CudaDevice() if torch.cuda.is_available() else EmulatedDevice())
        self._counters = Counters()
        self._buffers: list[_Buffer] = []
        self._hooks: list[RemovableHandle] = []
        self._closed = False
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be used outside it
            blocks = find_blocks(module, chosen, self._device.torch_device)
            named = [Layer(number, layer, name) for number, (layer, name) in enumerate(chosen.items())]
            for block in blocks:
                if block.layer is not None:
                    named[block.layer].add(block)
            stay = [block for block in blocks if block.layer is None]
            self._layers = [layer for layer in named if layer.num_bytes]
            self._moved_to_device = [block for block in stay if block.origin != self._device.torch_device]
            self._stayed_bytes = sum(block.num_bytes for block in stay if block.owners != {None})
            self._check_host(host_gib)
            self._in_stream = self._device.copy_stream("in")
            try:
                self._offload_all()
            except BaseException as error:
                self.close()
                if isinstance(error, HostMemoryError):
                    raise HostMemoryError(
                        f"the machine refuses host memory for the weights of {len(self._layers)} layers: name fewer "
                        "layers=, or leave it more memory."
                    ) from error
                raise
        self._by_module = {layer.module: layer for layer in self._layers}
        self._listed = dict(zip(self._layers, [*self._layers[1:], self._layers[0]], strict=True))
        # The layer that ran after two given layers: two predict it even if a layer runs twice in a pass.
        self._after: dict[tuple[Layer, Layer], Layer] = {}
        self._before = self._now = self._layers[-1]
        self._install_hooks(module)
        self._prefetch(self._layers[0], self._buffers[0])

    # ------------------------------------------------------------------------------------------ offload and restore

    def _check_host(self, host_gib: float | None) -> None:
        needed_bytes = sum(layer.host_bytes for layer in self._layers)
        if not needed_bytes:
            raise UsageError("layers= have no weights of their own; weights that they share stay on the device.")
        if host_gib is not None:
            if not is_within(0, host_gib, MOST):
                raise UsageError(f"host_gib={host_gib!r}: a number of GiB is expected, 0 or more, at most {MOST:g}")
            limit_bytes, limited_by = int(host_gib * GIB), f"host_gib={host_gib:g}"
        else:
            budget = safe_host_bytes(local_world_size())
            moving = (block for layer in self._layers for _, block in layer.blocks if block.origin.type == "cpu")
            limit_bytes = budget.safe_bytes + sum(block.num_bytes for block in moving)
            limited_by = f"{budget.reason}; plus the host memory that they occupy already"
        if needed_bytes > limit_bytes:
            raise HostMemoryError(
                f"the weights of {len(self._layers)} layers take {format_bytes(needed_bytes)} of host memory, but "
                f"{format_bytes(limit_bytes)} may be taken ({limited_by}). Name fewer layers=, or raise host_gib=."
            )

    def _offload_all(self) -> None:
        """Offload layer by layer, so that at most one exists twice; then move other weights, allocate buffers."""
        device = self._device.torch_device
        index = device.index if device.type == "cuda" else None
        node = gpu_numa_node(index) if index is not None else None
        strategy = PinStrategy(touch="none" if index is None else "pages")
        for layer in self._layers:
            (layer.region,), _ = prepare_regions([layer.host_bytes], strategy=strategy, device=index, numa_node=node)
            for block, chunk in layer.chunks(layer.region.tensor):
                block.move(chunk)
            layer.on_host = [weight.data for weight in layer.weights]
        for block in self._moved_to_device:
            block.move(self._device.allocate(block.num_bytes))
        for number in range(min(NUM_BUFFERS, len(self._layers))):
            memory = self._device.allocate(max(layer.num_bytes for layer in self._layers))
            # The memory may be recycled: earlier work of compute on it must come before any copy.
            event = self._device.record(self._device.current_stream())
            self._buffers.append(_Buffer(number, memory, read=event, filled=event))
            for layer in self._layers:
                layer.on_buffers.append(layer.on(memory))

    def _restore(self, block: Block) -> bool:
        """Move ``block`` to where it was. ``False``: the device has no room, so it was moved to the CPU."""
        has_room = True
        if block.is_moved:
            is_on_device = block.origin == self._device.torch_device
            on_cpu = partial(torch.empty, block.num_bytes, dtype=torch.uint8, device="cpu")
            try:
                memory = self._device.allocate(block.num_bytes) if is_on_device else on_cpu()
            except torch.OutOfMemoryError:
                memory, has_room = on_cpu(), False
            block.move(memory)
        return has_room

    def close(self) -> None:
        """Move all weights to where they were, and release host memory, buffers and hooks. A second call does nothing.

        It must not be called while a layer runs. Weights that were moved elsewhere in the meantime (``module.to``) stay
        there.

        Raises:
            SwapError: the device has no room for all weights that were there; the rest are on the CPU.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._device.synchronize()  # from here on nothing reads or writes host memory or buffers
        self._drop_buffers()
        left: list[Block] = []
        with torch.inference_mode(False):
            # Weights that came from the CPU are moved first, which frees device memory.
            left += [block for block in self._moved_to_device if not self._restore(block)]
            for layer in self._layers:
                left += [block for _, block in layer.blocks if not self._restore(block)]
                layer.on_host.clear()
                if layer.region is not None:
                    layer.region.unregister()  # no copy is under way: the device is idle
                    layer.region = None
        if self._owns_device:
            self._device.close()
        if left:
            raise SwapError(
                f"{format_bytes(sum(block.num_bytes for block in left))} of weights have no room on "
                f"{self._device.torch_device} any more and are on the CPU, the others are restored. Free memory there, "
                "then move the module (module.to)."
            )

    def _drop_buffers(self) -> None:
        """Release the device memory of the buffers: the weights to restore may need it."""
        for buffer in self._buffers:
            self._end_use(buffer)  # a layer was interrupted
            self._device.discard(buffer.memory.untyped_storage())
        self._buffers.clear()
        for layer in self._layers:
            layer.on_buffers.clear()

    def __enter__(self) -> WeightSwap:
        if self._closed:
            raise UsageError("this WeightSwap is closed: call swap.weights again.")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> WeightStats:
        """Return the figures now, in bytes, calls and ms (``WeightStats``). Those of memory are 0 after ``close``."""
        return WeightStats(
            in_bytes=sum(layer.in_bytes for layer in self._counters.layers.values()),
            out_bytes=self._counters.out_bytes,
            num_late=self._counters.num_late,
            wait_ms=self._counters.wait_ms(),
            host_bytes=sum(layer.region.nbytes for layer in self._layers if layer.region is not None),
            buffer_bytes=sum(buffer.memory.numel() for buffer in self._buffers),
            stayed_bytes=self._stayed_bytes,
        )

    # ------------------------------------------------------------------------------------------------ forward

    def _install_hooks(self, module: nn.Module) -> None:
        for layer in self._layers:
            # As the first and the last hook, so that the layer's other hooks find its weights on the device. The last
            # one runs after an exception too.
            self._hooks.append(layer.module.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(layer.module.register_forward_hook(self._leave, always_call=True))
        self._hooks.append(module.register_forward_pre_hook(self._begin, prepend=True))

    def _begin(self, module: nn.Module, args: object) -> None:
        """Check all layers before the model runs, and end the use of interrupted ones: none can be running now."""
        for layer in self._layers:
            layer.check_can_run()
        for buffer in self._buffers:
            self._end_use(buffer)

    def _enter(self, module: nn.Module, args: object) -> None:
        layer = self._by_module[module]
        layer.check_can_run()
        buffer = next((buffer for buffer in self._buffers if buffer.layer is layer), None)
        if buffer is not None:
            self._end_use(buffer)  # a layer was interrupted
        moved = [weight.name for weight in layer.weights if not weight.is_in_place()]
        if moved:
            raise SwapError(
                f"{', '.join(moved)}: replaced or moved while swapped (module.to, load_state_dict(assign=True)). "
                "Do that before swap.weights, or after its end."
            )
        if buffer is None or buffer.versions != layer.versions():  # not predicted, or written since the copy
            buffer = buffer or self._free_buffer()
            if buffer is None:
                raise SwapError(
                    f"{layer.name} begins while {NUM_BUFFERS} others run. Name no layers= that call each other. "
                    "After interrupted calls, call the whole model, or close and call swap.weights again."
                )
            self._counters.num_late += 1
            self._prefetch(layer, buffer)
        if layer is not self._now:
            self._after[self._before, self._now] = layer
            self._before, self._now = self._now, layer
        self._counters.add_stall(self._device.timed_wait(self._device.current_stream(), buffer.filled))
        self._counters.wait_ms()  # drops the stalls that are over
        layer.put(layer.on_buffers[buffer.number])
        buffer.in_use = True
        follower = self._after.get((self._before, self._now)) or self._listed[layer]
        free = self._free_buffer()
        if free is not None and all(buffer.layer is not follower for buffer in self._buffers):
            self._prefetch(follower, free)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        layer = self._by_module[module]
        buffer = next((buffer for buffer in self._buffers if buffer.layer is layer and buffer.in_use), None)
        if buffer is None:
            return  # the call was refused in ``_enter``
        aliased = any(is_view_of(leaf, buffer.memory) for leaf in tree_leaves(output))
        self._end_use(buffer)
        if aliased:
            raise SwapError(f"{layer.name} returns a view of its weights, which are about to be released. {LEAVE_OUT}")

    def _end_use(self, buffer: _Buffer) -> None:
        """Point the layer's weights to host memory again, after copying back what it wrote."""
        layer = buffer.layer
        if not buffer.in_use or layer is None or layer.region is None:
            return
        if buffer.versions != layer.versions():
            # Written on the device: by the layer itself (a cache), or after an interruption by others. This copy is
            # ordered behind compute, and the host waits for it, so the next read or copy finds the new values.
            layer.region.tensor[: layer.num_bytes].copy_(buffer.memory[: layer.num_bytes])
            buffer.versions = layer.versions()
            self._counters.layers[layer.number].out_bytes += layer.num_bytes
        buffer.in_use = False
        buffer.read = self._device.record(self._device.current_stream())
        layer.put(layer.on_host)

    def _free_buffer(self) -> _Buffer | None:
        """Return a buffer that is not in use; if possible not that of the last layer, which compute may still read."""
        free = (buffer for buffer in self._buffers if not buffer.in_use)
        return min(free, key=lambda buffer: buffer.layer is self._now, default=None)

    def _prefetch(self, layer: Layer, buffer: _Buffer) -> None:
        """Enqueue the copy of ``layer`` into ``buffer``."""
        assert layer.region is not None
        self._device.wait(self._in_stream, buffer.read)
        targets, sources = [buffer.memory[: layer.num_bytes]], [layer.region.tensor[: layer.num_bytes]]
        self._device.copy(self._in_stream, targets, sources)
        buffer.filled = self._device.record(self._in_stream)
        buffer.layer, buffer.versions = layer, layer.versions()
        self._counters.layers[layer.number].in_bytes += layer.num_bytes


def _check_unswapped(module: nn.Module) -> None:
    for name, owner in module.named_modules():
        if any(isinstance(getattr(hook, "__self__", None), WeightSwap) for hook in owner._forward_pre_hooks.values()):
            raise UsageError(
                f"{name or 'this module'} is swapped already: name all layers in one call, or close the other first."
            )
