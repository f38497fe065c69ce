"""Inference with a model whose weights exceed the device: those of its layers rest in host memory and come one ahead.

While a layer computes, the weights of the next one come in on a copy stream, into the other of two buffers that take
turns. Streaming weights through a device layer by layer is an idea of ZeRO-Inference (DeepSpeed), FlexGen and
accelerate, among others. Here each layer is one copy, and the order in which layers run is learned.

Parameters and buffers stay the objects that everybody has. Their data are host memory while they rest and lie on a
buffer while their layer runs, by ``tensor.data = …``: whoever looks between two calls (``state_dict``) sees the values,
on the CPU, and whoever writes there (``load_state_dict``) is heard, by the tensors' version counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron.swap.devices.base import Device, Event
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.host_memory import (
    HostMemoryError,
    PinStrategy,
    gpu_numa_node,
    local_world_size,
    prepare_regions,
    safe_host_bytes,
)
from megatron.swap.packed_weights import LEAVE_OUT, Block, Layer, find_blocks, is_view_of, named_layers
from megatron.swap.trace import Counters
from megatron.swap.types import GIB, MOST, SwapError, UsageError, format_bytes, is_within

NUM_BUFFERS = 2
"""One is computed with while the other is filled."""


@dataclass(frozen=True)
class WeightStats:
    """Since the start, and where the weights are.

    Attributes:
        in_bytes: copied to the device.
        out_bytes: copied back, of layers that wrote to their weights or buffers.
        num_late: layers that began before their copy was enqueued: nobody foresaw them.
        wait_ms: for how long compute has waited for copies, as far as the device has got.
        host_bytes: of host memory, in whole pages.
        buffer_bytes: of device memory, for the layers that are there.
        stayed_bytes: of weights in these layers that others share: they stay on the device.
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
    """Let the weights of ``layers`` rest in host memory, until the end of the ``with``, or ``close``.

    Args:
        module: the model, in eval mode, called under ``torch.no_grad()`` or ``torch.inference_mode()``. Its weights are
            on the device or on the CPU. What of them is not in ``layers``, or shared with it, is on the device from now
            on: brought there if need be.
        layers: modules inside it, none inside another, in the order in which they run at first; later their order is
            learned from how they ran.
        host_gib: most host memory in GiB. Default: what is safe to take, where weights on the CPU make room for
            themselves.
        device: default: the current CUDA device; its emulation without CUDA.

    Raises:
        UsageError: this cannot work; nothing is changed.
        HostMemoryError: the weights do not fit host memory; all is as it was.
        torch.OutOfMemoryError: two layers and what stays do not fit the device; all is as it was.
    """
    return WeightSwap(module, layers, host_gib=host_gib, device=device)


@dataclass(eq=False)
class _Buffer:
    """Device memory for one layer.

    Attributes:
        read: passes when compute has read what was there; copies into it wait for that.
        filled: passes when the copy of ``layer`` is there; compute waits for that.
        versions: of its weights when they were copied.
        in_use: ``layer`` runs, and has its weights here.
    """

    number: int
    memory: torch.Tensor
    read: Event
    filled: Event
    layer: Layer | None = None
    versions: list[int] = field(default_factory=list)
    in_use: bool = False


class WeightSwap:
    """Made by ``weights``; a context that yields itself. Not thread-safe: one call of the model at a time.

    Host memory and buffers live until ``close``, which waits for the device before it lets go of them. A layer that
    was interrupted (``KeyboardInterrupt``) keeps its buffer until it or the model is called again.
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
        with torch.inference_mode(False):  # a tensor born in inference mode is of no use outside
            blocks = find_blocks(module, chosen, self._device.torch_device)
            named = [Layer(number, layer, name) for number, (layer, name) in enumerate(chosen.items())]
            for block in blocks:
                if block.layer is not None:
                    named[block.layer].add(block)
            stay = [block for block in blocks if block.layer is None]
            self._layers = [layer for layer in named if layer.num_bytes]
            self._brought = [block for block in stay if block.origin != self._device.torch_device]
            self._stayed_bytes = sum(block.num_bytes for block in stay if block.places != {None})
            self._check_host(host_gib)
            self._in_stream = self._device.copy_stream("in")
            try:
                self._move_out()
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
        # Which layer ran after which two: they tell it also where a layer runs twice in a pass.
        self._after: dict[tuple[Layer, Layer], Layer] = {}
        self._before = self._now = self._layers[-1]
        self._watch(module)
        self._fetch(self._layers[0], self._buffers[0])

    # ---------------------------------------------------------------------------------------------- there and back

    def _check_host(self, host_gib: float | None) -> None:
        needed_bytes = sum(layer.host_bytes for layer in self._layers)
        if not needed_bytes:
            raise UsageError("layers= have no weights of their own; what they share with others stays on the device.")
        if host_gib is not None:
            if not is_within(0, host_gib, MOST):
                raise UsageError(f"host_gib={host_gib!r}: a number of GiB is expected, 0 or more, at most {MOST:g}")
            limit_bytes, limited_by = int(host_gib * GIB), f"host_gib={host_gib:g}"
        else:
            budget = safe_host_bytes(local_world_size())
            moving = (block for layer in self._layers for _, block in layer.blocks if block.origin.type == "cpu")
            limit_bytes = budget.safe_bytes + sum(block.num_bytes for block in moving)
            limited_by = f"{budget.reason}; and what they take there already"
        if needed_bytes > limit_bytes:
            raise HostMemoryError(
                f"the weights of {len(self._layers)} layers take {format_bytes(needed_bytes)} of host memory, but "
                f"{format_bytes(limit_bytes)} may be taken ({limited_by}). Name fewer layers=, or raise host_gib=."
            )

    def _move_out(self) -> None:
        """Layer by layer, so that one alone is in two places; then what stays has room, and the buffers."""
        device = self._device.torch_device
        index = device.index if device.type == "cuda" else None
        node = gpu_numa_node(index) if index is not None else None
        strategy = PinStrategy(touch="none" if index is None else "pages")
        for layer in self._layers:
            (layer.region,), _ = prepare_regions([layer.host_bytes], strategy=strategy, device=index, numa_node=node)
            for block, part in layer.parts(layer.region.tensor):
                block.move(part)
            layer.at_home = [weight.here for weight in layer.weights]
        for block in self._brought:
            block.move(self._device.allocate(block.num_bytes))
        for number in range(min(NUM_BUFFERS, len(self._layers))):
            memory = self._device.allocate(max(layer.num_bytes for layer in self._layers))
            # The memory may be recycled: what compute still does with it comes before any copy.
            event = self._device.record(self._device.current_stream())
            self._buffers.append(_Buffer(number, memory, read=event, filled=event))
            for layer in self._layers:
                layer.on_buffers.append(layer.on(memory))

    def _move_back(self, block: Block) -> bool:
        """To where it was; ``False``: the device has no room, it is on the CPU."""
        has_room = True
        if block.is_away:
            is_on_device = block.origin == self._device.torch_device
            on_cpu = partial(torch.empty, block.num_bytes, dtype=torch.uint8, device="cpu")
            try:
                memory = self._device.allocate(block.num_bytes) if is_on_device else on_cpu()
            except torch.OutOfMemoryError:
                memory, has_room = on_cpu(), False
            block.move(memory)
        return has_room

    def close(self) -> None:
        """Put all weights back where they were, and give back host memory, buffers and hooks. Again: does nothing.

        Not while a layer runs. What others have put elsewhere in the meantime (``module.to``) stays there.

        Raises:
            SwapError: the device has no room for all weights that were there; the others are on the CPU.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._device.synchronize()  # nothing reads host memory or the buffers, nothing writes to them
        self._drop_buffers()
        left: list[Block] = []
        with torch.inference_mode(False):
            # What was on the CPU goes first, and makes room.
            left += [block for block in self._brought if not self._move_back(block)]
            for layer in self._layers:
                left += [block for _, block in layer.blocks if not self._move_back(block)]
                layer.at_home.clear()
                if layer.region is not None:
                    layer.region.unregister()  # no copy: the device is idle since the buffers are gone
                    layer.region = None
        if self._owns_device:
            self._device.close()
        if left:
            raise SwapError(
                f"{format_bytes(sum(block.num_bytes for block in left))} of weights have no room on "
                f"{self._device.torch_device} any longer and are on the CPU, all others are back. Free memory there, "
                "then move the module (module.to)."
            )

    def _drop_buffers(self) -> None:
        """Nothing holds their memory when this returns: what comes back may need it."""
        for buffer in self._buffers:
            self._end_use(buffer)  # it was interrupted
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
        """The figures now; all of memory 0 after ``close``."""
        return WeightStats(
            in_bytes=sum(layer.in_bytes for layer in self._counters.layers.values()),
            out_bytes=self._counters.out_bytes,
            num_late=self._counters.num_late,
            wait_ms=self._counters.wait_ms(),
            host_bytes=sum(layer.region.nbytes for layer in self._layers if layer.region is not None),
            buffer_bytes=sum(buffer.memory.numel() for buffer in self._buffers),
            stayed_bytes=self._stayed_bytes,
        )

    # ------------------------------------------------------------------------------------------------- in forward

    def _watch(self, module: nn.Module) -> None:
        for layer in self._layers:
            # First and last: other hooks of the layer find its weights on the device. Also after an exception.
            self._hooks.append(layer.module.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(layer.module.register_forward_hook(self._leave, always_call=True))
        self._hooks.append(module.register_forward_pre_hook(self._begin, prepend=True))

    def _begin(self, module: nn.Module, args: object) -> None:
        """The model is called: no layer can be running. What is wrong is told before anything runs."""
        for layer in self._layers:
            layer.check_can_run()
        for buffer in self._buffers:
            self._end_use(buffer)

    def _enter(self, module: nn.Module, args: object) -> None:
        layer = self._by_module[module]
        layer.check_can_run()
        buffer = next((buffer for buffer in self._buffers if buffer.layer is layer), None)
        if buffer is not None:
            self._end_use(buffer)  # it was interrupted
        moved = [weight.name for weight in layer.weights if not weight.is_in_place()]
        if moved:
            raise SwapError(
                f"{', '.join(moved)}: replaced or moved while swapped (module.to, load_state_dict(assign=True)). "
                "Do that before swap.weights, or after its end."
            )
        if buffer is None or buffer.versions != layer.versions():  # not foreseen, or written to since
            buffer = buffer or self._free_buffer()
            if buffer is None:
                raise SwapError(
                    f"{layer.name} begins while {NUM_BUFFERS} others run. Name no layers= that call each other; if "
                    "calls were interrupted, call the model as a whole, or close and begin again."
                )
            self._counters.num_late += 1
            self._fetch(layer, buffer)
        if layer is not self._now:
            self._after[self._before, self._now] = layer
            self._before, self._now = self._now, layer
        self._counters.add_stall(self._device.timed_wait(self._device.current_stream(), buffer.filled))
        self._counters.wait_ms()  # forgets the stalls that are over
        layer.put(layer.on_buffers[buffer.number])
        buffer.in_use = True
        follower = self._after.get((self._before, self._now)) or self._listed[layer]
        free = self._free_buffer()
        if free is not None and all(buffer.layer is not follower for buffer in self._buffers):
            self._fetch(follower, free)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        layer = self._by_module[module]
        buffer = next((buffer for buffer in self._buffers if buffer.layer is layer and buffer.in_use), None)
        if buffer is None:
            return  # it was refused
        aliased = any(is_view_of(leaf, buffer.memory) for leaf in tree_leaves(output))
        self._end_use(buffer)
        if aliased:
            raise SwapError(f"{layer.name} returns a view of its weights, which are about to go. {LEAVE_OUT}")

    def _end_use(self, buffer: _Buffer) -> None:
        """Compute that was enqueued until now reads it last; between calls the weights are at home."""
        layer = buffer.layer
        if not buffer.in_use or layer is None or layer.region is None:
            return
        if buffer.versions != layer.versions():
            # Written to here: by the layer itself (a cache), or by others after it was interrupted. This copy is
            # ordered behind compute, and the host waits for it, so whoever reads or copies next finds it done.
            layer.region.tensor[: layer.num_bytes].copy_(buffer.memory[: layer.num_bytes])
            buffer.versions = layer.versions()
            self._counters.layers[layer.number].out_bytes += layer.num_bytes
        buffer.in_use = False
        buffer.read = self._device.record(self._device.current_stream())
        layer.put(layer.at_home)

    def _free_buffer(self) -> _Buffer | None:
        """Not in use; rather not that of the layer that ran last: compute may still be at it."""
        free = (buffer for buffer in self._buffers if not buffer.in_use)
        return min(free, key=lambda buffer: buffer.layer is self._now, default=None)

    def _fetch(self, layer: Layer, buffer: _Buffer) -> None:
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
