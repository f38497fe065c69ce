"""Device buffers that the weights of layers take turns in, filled one layer ahead.

Two buffers suffice: compute reads one while the copy stream fills the other. The order in which layers are needed is
learned, so that a backward, which goes the other way, is prefetched as well as a forward.

In a backward the weights of a layer point to its buffer from when the backward enters the layer until the buffer is
taken for another layer, or the backward ends: a checkpoint may run the layer again without any hook of ours
(transformers 5.23 calls the ``forward`` of the layer's class).

A buffer is overwritten only if nobody else views its memory. Memory that others still view is left to them, with the
values that they saw, and the buffer gets new memory. So a view of a weight that somebody keeps is never wrong.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise

import torch

from megatron.swap.common.counters import Counters
from megatron.swap.common.types import SwapError
from megatron.swap.devices.base import Device, Event, Owner, Stream, bytes_of
from megatron.swap.engine.overrides import in_backward
from megatron.swap.params.packed_weights import Layer

NUM_BUFFERS = 2  # one holds the weights of the layer that computes while the other is filled


class Use(Enum):
    """The work that needs a layer's weights."""

    INFERENCE = auto()  # forward without gradients
    FORWARD = auto()
    RECOMPUTATION = auto()  # forward inside a backward: a checkpoint's
    BACKWARD = auto()


@dataclass(eq=False)
class Buffer:
    """Device memory for one layer."""

    number: int
    storage: torch.UntypedStorage  # as long as the largest layer
    read: Event  # passes when compute has finished with the memory; copies into it wait for that
    filled: Event  # passes when the copy of `layer` is complete; compute waits for that
    num_owners: int = 0  # references to `storage` while only the buffer and its layers' views have any
    layer: Layer | None = None  # whose weights are here, or are being copied here
    versions: list[int] = field(default_factory=list)  # version counters of its weights when they were copied
    waited: Stream | None = None  # has waited for `filled`
    in_use: bool = False  # the weights of `layer` point here
    is_running: bool = False  # `layer` runs forward, so nothing else may be copied here

    @property
    def is_viewed(self) -> bool:
        """Whether others view the memory."""
        return _num_references(self.storage) > self.num_owners


class WeightBuffers:
    """Buffers on ``device`` for ``layers``, in the order in which they first run, whose bytes are in host memory."""

    def __init__(self, device: Device, layers: list[Layer]) -> None:
        self.counters = Counters()  # of copies, late layers and waits
        self.peak_bytes = 0  # most device memory at once, with memory that was left to others
        self._device = device
        self._layers = layers
        self._lane = device.copier.lane("in", Owner.WEIGHTS)
        self._buffers: list[Buffer] = []
        self._left: list[weakref.ref[torch.UntypedStorage]] = []
        self._backward = -1
        self._following = dict(pairwise(layers))
        self._preceding = {after: before for before, after in self._following.items()}
        # The layer that was needed after two given ones: two predict it even if a layer runs twice in a pass.
        self._after: dict[tuple[tuple[Layer, Use], tuple[Layer, Use]], Layer] = {}
        self._before = self._now = (layers[-1], Use.INFERENCE)

    def begin(self) -> None:
        """Allocate the buffers, and prefetch the first layer. Raises a ``torch.OutOfMemoryError`` without room."""
        for number in range(min(NUM_BUFFERS, len(self._layers))):
            storage, event = self._allocate()
            self._buffers.append(Buffer(number, storage, read=event, filled=event))
            self._make_views(self._buffers[-1])
        self._note_peak()
        self._prefetch(self._layers[0], self._buffers[0])

    def _allocate(self) -> tuple[torch.UntypedStorage, Event]:
        """Return new memory, and an event that copies into it wait for."""
        storage = self._device.allocate(max(layer.num_bytes for layer in self._layers)).untyped_storage()
        # The memory may be recycled: earlier work of compute on it must come before any copy.
        return storage, self._device.record(self._device.current_stream())

    def _make_views(self, buffer: Buffer) -> None:
        memory = bytes_of(buffer.storage)
        for layer in self._layers:
            layer.on_buffers[buffer.number] = layer.on(memory)
        del memory
        buffer.num_owners = _num_references(buffer.storage)

    def _note_peak(self) -> None:
        left = [storage for reference in self._left if (storage := reference()) is not None]
        self._left = list(map(weakref.ref, left))
        self.peak_bytes = max(self.peak_bytes, self.num_bytes + sum(storage.nbytes() for storage in left))

    @property
    def num_bytes(self) -> int:
        """Device memory of the buffers."""
        return sum(buffer.storage.nbytes() for buffer in self._buffers)

    def close(self) -> None:
        """Release the device memory. The device is idle, and no layer runs."""
        self.end_interrupted()
        for buffer in self._buffers:
            if not buffer.is_viewed:
                self._device.discard(buffer.storage)
        self._buffers.clear()
        for layer in self._layers:
            layer.on_buffers.clear()

    # ------------------------------------------------------------------------------------------------ use

    def holding(self, layer: Layer) -> Buffer | None:
        """Return the buffer of ``layer``, if there is one."""
        return next((buffer for buffer in self._buffers if buffer.layer is layer), None)

    def viewed_by(self, storage: torch.UntypedStorage) -> Buffer | None:
        """Return the buffer whose memory is ``storage``, if there is one."""
        return next((buffer for buffer in self._buffers if buffer.storage._cdata == storage._cdata), None)

    def _need(self, layer: Layer, use: Use) -> Buffer:
        """Return a buffer with the weights of ``layer``, for which compute waits. Prefetch the layer that follows."""
        buffer = self.holding(layer)
        if buffer is None or (not buffer.in_use and buffer.versions != layer.versions()):  # written since the copy
            buffer = buffer or self._free_buffer()
            if buffer is None:
                raise SwapError(
                    f"{layer.name} begins while {NUM_BUFFERS} others run. Name no layers= that call each other. "
                    "After interrupted calls, call the whole model, or close and call swap.weights again."
                )
            self.counters.num_late += 1
            self._prefetch(layer, buffer)
        if layer is not self._now[0]:
            self._after[self._before, self._now] = layer
            self._before, self._now = self._now, (layer, use)
        compute = self._device.current_stream()
        if buffer.waited is not compute:  # for CUDA streams `None != compute` is False
            self.counters.add_stall(self._device.timed_wait(compute, buffer.filled))
            self.counters.wait_ms()  # drops the stalls that are over
            buffer.waited = compute
        self._prefetch_follower(layer, use, buffer)
        return buffer

    def begin_forward(self, layer: Layer, use: Use) -> None:
        """Point weights to a buffer, for which compute waits, or raise a ``SwapError`` if none is free."""
        self._put(layer, use).is_running = True

    def end_forward(self, buffer: Buffer) -> None:
        """Note that the layer on ``buffer`` has run. If it was run again by a backward, its weights stay there."""
        buffer.is_running = False
        if not in_backward():
            self.end_use(buffer)

    def begin_backward(self, layer: Layer) -> Buffer:
        """Do as ``begin_forward`` where backward enters ``layer``, or unpacks a weight. Return the buffer."""
        return self._put(layer, Use.BACKWARD)

    def _put(self, layer: Layer, use: Use) -> Buffer:
        layer.check_in_place()
        buffer = self._need(layer, use)
        if not buffer.in_use:
            layer.put(layer.on_buffers[buffer.number])
            buffer.in_use = True
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._backward):
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return buffer

    def _end_backward(self) -> None:
        for buffer in self._buffers:
            if not buffer.is_running:
                self.end_use(buffer)

    def end_use(self, buffer: Buffer) -> None:
        """Point the layer's weights to host memory again, after copying back what it wrote."""
        layer = buffer.layer
        if not buffer.in_use or layer is None or layer.region is None:
            return
        if buffer.versions != layer.versions():
            # Written on the device: by the layer itself (a cache), or after an interruption by others. This copy is
            # ordered behind compute, and the host waits for it, so the next read or copy finds the new values.
            layer.region.tensor[: layer.num_bytes].copy_(bytes_of(buffer.storage)[: layer.num_bytes])
            buffer.versions = layer.versions()
            self.counters.layers[layer.number].out_bytes += layer.num_bytes
        buffer.in_use = buffer.is_running = False
        # Nobody says when a backward is done with a layer: all that is enqueued until now may read its weights.
        buffer.read = self._device.record(self._device.current_stream())
        layer.put(layer.on_host)

    def end_interrupted(self) -> None:
        """End the use of all buffers: no layer runs."""
        for buffer in self._buffers:
            self.end_use(buffer)

    # ------------------------------------------------------------------------------------------- prefetch

    def _prefetch_follower(self, layer: Layer, use: Use, buffer: Buffer) -> None:
        follower = self._after.get((self._before, self._now)) or self._listed(layer, use)
        free = self._free_buffer()
        if follower is None or free is None or free is buffer or self.holding(follower) is not None:
            return
        self._prefetch(follower, free)

    def _listed(self, layer: Layer, use: Use) -> Layer | None:
        """Return the layer that is expected after ``layer`` as long as nothing is learned."""
        if use in (Use.BACKWARD, Use.RECOMPUTATION):
            return self._preceding.get(layer)
        # After the last layer comes the next forward of an inference, or a backward of the last layers, which are here.
        return self._following.get(layer, self._layers[0] if use is Use.INFERENCE else None)

    def _free_buffer(self) -> Buffer | None:
        """Return a buffer whose layer does not run; if possible not the last layer's, which compute may still read."""
        free: Iterable[Buffer] = (buffer for buffer in self._buffers if not buffer.is_running)
        return min(free, key=lambda buffer: buffer.layer is self._now[0], default=None)

    def _prefetch(self, layer: Layer, buffer: Buffer) -> None:
        """Enqueue the copy of ``layer`` into ``buffer``, whose layer does not run."""
        assert layer.region is not None
        self.end_use(buffer)
        if buffer.is_viewed:
            self._left.append(weakref.ref(buffer.storage))
            buffer.storage, buffer.read = self._allocate()
            self._make_views(buffer)
            self._note_peak()
        self._lane.wait(buffer.read)
        targets, sources = [bytes_of(buffer.storage)[: layer.num_bytes]], [layer.region.tensor[: layer.num_bytes]]
        self._lane.copy(targets, sources)
        buffer.filled = self._lane.end()
        buffer.layer, buffer.versions, buffer.waited = layer, layer.versions(), None
        self.counters.layers[layer.number].in_bytes += layer.num_bytes


def _num_references(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)
