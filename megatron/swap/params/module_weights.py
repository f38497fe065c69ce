"""Weights in host memory, for models whose weights exceed the device: each layer is prefetched while another computes.

While a layer computes, a copy stream prefetches the weights of the next one into the other of two device buffers that
take turns. ZeRO-Inference (DeepSpeed), FlexGen and accelerate, among others, stream weights through a device layer by
layer. Here each layer is one copy, and the order in which layers run is learned. In training the frozen weights are
swapped, and a backward streams them too (``frozen_weights``).

Parameters and buffers stay the same objects. ``tensor.data = …`` points them to host memory, and to a device buffer
while their layer runs. So code that reads them between two calls (``state_dict``) sees the values, on the CPU;
writes (``load_state_dict``) are detected by the tensors' version counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from megatron.swap.common.spelling import ACTIVATIONS
from megatron.swap.common.types import GIB, MOST, SwapError, UsageError, format_bytes, is_within
from megatron.swap.devices.base import Device
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.overrides import NotCopied, has_boundary, in_backward
from megatron.swap.memory.host_memory import HostMemoryError, local_world_size, prepare_regions, safe_host_bytes
from megatron.swap.params.frozen_weights import FrozenForward
from megatron.swap.params.packed_weights import LEAVE_OUT, Block, Layer, find_blocks, is_view_of, named_layers
from megatron.swap.params.stacks import is_compiled, stacked
from megatron.swap.params.weight_buffers import Use, WeightBuffers


@dataclass(frozen=True)
class WeightStats:
    """Bytes copied since the start, and the memory of the weights."""

    in_bytes: int  # copied to the device, in forward and in backward
    out_bytes: int  # copied back, for layers that wrote to their weights or buffers
    num_late: int  # calls of layers that were not prefetched, because they were not predicted
    wait_ms: float  # that compute waited for copies, as far as the device has run
    host_bytes: int  # host memory, in whole pages
    buffer_bytes: int  # device memory of the buffers
    buffer_peak_bytes: int  # the most at once, with memory that was left to others who view it
    stayed_bytes: int  # weights of these layers that stay on the device: other modules share them, or they are trained


@ACTIVATIONS.errors()
def weights(
    module: nn.Module, layers: Iterable[nn.Module] | None = None, *, training: bool = False,
    host_gib: float | None = None, device: Device | None = None,
) -> WeightSwap:  # fmt: skip
    """Offload the weights of ``layers`` to host memory, for inference, until the end of the ``with``, or ``close``.

    With ``training`` the model trains, and only frozen parameters (``requires_grad`` is False) are offloaded. Forward
    and backward reload them a layer ahead; a checkpoint that recomputes a layer does too. Trained parameters (adapters)
    and buffers stay on the device. Losses, gradients and trained weights are equal to the bit to a run without
    swapping.

    Args:
        module: the model. Its weights are on the device or on the CPU. Weights that are not offloaded are moved to the
            device if they are not there, with their gradients. Without ``training`` it is in eval mode, and called
            under ``torch.no_grad()`` or ``torch.inference_mode()``.
        layers: modules of the model, none inside another, in the order in which they first run. Later the order is
            learned from their calls. Layers that are left out stay on the device. Default: the children of every
            outermost ``nn.ModuleList`` and ``nn.Sequential``.
        training: train the parameters that are not frozen. Call this before ``swap.activations`` and before the
            optimizer is made, and close it after the last backward. A frozen weight that is changed between a forward
            and its backward is an error (RuntimeError), as in PyTorch.
        host_gib: most host memory in GiB. Default: what is safe to take, plus what these weights occupy on the CPU now.
        device: default: the current CUDA device; its emulation without CUDA.

    Raises:
        UsageError: this cannot work; nothing is changed.
        HostMemoryError: the weights do not fit host memory; nothing is changed.
        torch.OutOfMemoryError: two layers and the weights that stay do not fit the device; nothing is changed.
    """
    return WeightSwap(module, layers, training=training, host_gib=host_gib, device=device)


class WeightSwap(NotCopied):
    """Offloaded weights of a model. Made by ``weights``; a context that yields itself.

    Not thread-safe: one call of the model at a time. Host memory and buffers live until ``close``, which waits for the
    device before it releases them. A layer that was interrupted (``KeyboardInterrupt``) keeps its buffer until it or
    the model is called again.
    """

    def __init__(
        self, module: nn.Module, layers: Iterable[nn.Module] | None, *, training: bool, host_gib: float | None,
        device: Device | None,
    ) -> None:  # fmt: skip
        chosen = named_layers(module, _stacks_of(module) if layers is None else layers, training)
        _check_unswapped(module)
        if training:
            _check_trainable(chosen)
        self._training = training
        self._owns_device = device is None
        self._device = device or (CudaDevice() if torch.cuda.is_available() else EmulatedDevice())
        self._hooks: list[RemovableHandle | FrozenForward] = []
        self._closed = False
        with torch.inference_mode(False):  # a tensor made in inference mode cannot be used outside it
            blocks = find_blocks(module, chosen, self._device.torch_device, training)
            named = [Layer(number, layer, name) for number, (layer, name) in enumerate(chosen.items())]
            for block in blocks:
                if block.layer is not None:
                    named[block.layer].add(block)
            stay = [block for block in blocks if block.layer is None]
            self._layers = [layer for layer in named if layer.num_bytes]
            self._moved_to_device = [block for block in stay if block.origin != self._device.torch_device]
            self._stayed_bytes = sum(block.num_bytes for block in stay if block.owners != {None})
            self._check_host(host_gib)
            self._buffers = WeightBuffers(self._device, self._layers)
            try:
                self._offload_all()
                self._buffers.begin()
            except BaseException as error:
                self.close()
                if isinstance(error, HostMemoryError):
                    raise HostMemoryError(
                        f"the machine refuses host memory for the weights of {len(self._layers)} layers: name fewer "
                        "layers=, or leave it more memory."
                    ) from error
                raise
        self._by_module = {layer.module: layer for layer in self._layers}
        self._install_hooks(module)

    # ------------------------------------------------------------------------------------------ offload and restore

    def _check_host(self, host_gib: float | None) -> None:
        needed_bytes = sum(layer.host_bytes for layer in self._layers)
        if not needed_bytes and self._training:
            raise UsageError(
                "layers= have no frozen parameters of their own, and training=True offloads frozen ones alone. Freeze "
                "the base weights before (requires_grad_(False); peft's get_peft_model does), or offload what is "
                "trained: swap.activations, and the optimizer's state."
            )
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
        """Offload layer by layer, so that at most one exists twice; then move other weights."""
        device = self._device.torch_device
        index = device.index if device.type == "cuda" else None
        for layer in self._layers:
            (layer.region,), _ = prepare_regions([layer.host_bytes], device=index)
            for block, chunk in layer.chunks(layer.region.tensor):
                block.move(chunk)
            layer.on_host = [weight.data for weight in layer.weights]
        for block in self._moved_to_device:
            block.move(self._device.allocate(block.num_bytes))

    def _restore(self, block: Block) -> bool:
        """Move ``block`` to where it was. Return False if it was moved to the CPU, since the device has no room."""
        has_room, memory = True, None
        if block.is_moved and block.origin == self._device.torch_device:
            try:
                memory = self._device.allocate(block.num_bytes)
            except torch.OutOfMemoryError:
                has_room = False
        if block.is_moved:
            block.move(torch.empty(block.num_bytes, dtype=torch.uint8, device="cpu") if memory is None else memory)
        return has_room

    def close(self) -> None:
        """Move all weights to where they were, and release host memory, buffers and hooks. A second call does nothing.

        It must not be called while a layer runs. Weights that were moved elsewhere in the meantime (``module.to``) stay
        there. Raises a ``SwapError`` if the device has no room for all weights; the rest are on the CPU.
        """
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._device.synchronize()  # from here on nothing reads or writes host memory or buffers
        # The device memory of the buffers is released first: the weights to restore may need it.
        self._buffers.close()
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

    def __enter__(self) -> WeightSwap:
        if self._closed:
            raise UsageError("this WeightSwap is closed: call swap.weights again.")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> WeightStats:
        """Return the figures now, in bytes, calls and ms. Those of memory now are 0 after ``close``."""
        buffers, totals = self._buffers, self._buffers.counters.totals()
        host_bytes = sum(layer.region.nbytes for layer in self._layers if layer.region is not None)
        return WeightStats(
            totals.in_bytes, totals.out_bytes, totals.num_late, totals.wait_ms, host_bytes, buffers.num_bytes,
            buffers.peak_bytes, self._stayed_bytes,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ forward

    def _install_hooks(self, module: nn.Module) -> None:
        for layer in self._layers:
            # As the first and the last hook, so that the layer's other hooks find its weights on the device. The last
            # one runs after an exception too.
            self._hooks.append(layer.module.register_forward_pre_hook(self._enter, prepend=True))
            self._hooks.append(layer.module.register_forward_hook(self._leave, always_call=True))
            if self._training:
                self._hooks.append(FrozenForward(layer.module, self._buffers))
        self._hooks.append(module.register_forward_pre_hook(self._begin, prepend=True))

    def _begin(self, module: nn.Module, args: object) -> None:
        """Check all layers before the model runs, and end the use of interrupted ones: none can be running now."""
        for layer in self._layers:
            layer.check_can_run(self._training)
        self._buffers.end_interrupted()

    def _enter(self, module: nn.Module, args: object) -> None:
        layer = self._by_module[module]
        layer.check_can_run(self._training)
        buffer = self._buffers.holding(layer)
        if buffer is not None and buffer.is_running:
            self._buffers.end_use(buffer)  # the layer was interrupted
        use = Use.FORWARD if torch.is_grad_enabled() else Use.INFERENCE
        self._buffers.begin_forward(layer, Use.RECOMPUTATION if in_backward() else use)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        layer = self._by_module[module]
        buffer = self._buffers.holding(layer)
        if buffer is None or not buffer.is_running:
            return  # the call was refused in ``_enter``
        leaves = tree_leaves(output)
        aliased = any(is_view_of(leaf, buffer.storage) for leaf in leaves)
        self._buffers.end_forward(buffer)
        if aliased:
            raise SwapError(f"{layer.name} returns a view of its weights, which are about to be released. {LEAVE_OUT}")
        if self._training and torch.is_grad_enabled() and not in_backward():
            self._mark(layer, leaves)

    def _mark(self, layer: Layer, leaves: list[object]) -> None:
        """Hook the nodes of a layer's output: all of its backward comes after one of them."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(partial(self._enter_backward, layer))

    def _enter_backward(self, layer: Layer, grads: object) -> None:
        if not self._closed:  # else whoever needs a weight says so
            self._buffers.begin_backward(layer)


def computing_devices(module: nn.Module) -> dict[int, torch.device]:
    """Return the device that computes with each offloaded weight of ``module``, by the ``id`` of the tensor."""
    hooks = [hook for owner in module.modules() for hook in owner._forward_pre_hooks.values()]
    swaps = {swap for hook in hooks if isinstance(swap := getattr(hook, "__self__", None), WeightSwap)}
    return {
        id(weight.tensor): swap._device.torch_device
        for swap in swaps for layer in swap._layers for weight in layer.weights
    }  # fmt: skip


def _check_unswapped(module: nn.Module) -> None:
    for name, owner in module.named_modules():
        if any(isinstance(getattr(hook, "__self__", None), WeightSwap) for hook in owner._forward_pre_hooks.values()):
            raise UsageError(
                f"{name or 'this module'} is swapped already: name all layers in one call, or close the other first."
            )


def _stacks_of(module: nn.Module) -> Iterable[nn.Module]:
    found = list(dict.fromkeys(stacked(module))) if isinstance(module, nn.Module) else []
    if isinstance(module, nn.Module) and not found:
        raise UsageError(
            f"{type(module).__name__} has no nn.ModuleList and no nn.Sequential with modules in it: name the modules "
            "whose weights are offloaded, layers=[model.block1, model.block2]."
        )
    return found


def _check_trainable(layers: dict[nn.Module, str]) -> None:
    """Check that the saved tensors of ``layers``, which have these names, can be seen one by one, and first by us."""
    for layer, name in layers.items():
        for inner in layer.modules():
            if has_boundary(inner):
                raise UsageError(
                    f"{name} has swapped activations: with training=True call swap.weights before swap.activations, so "
                    "that the activations' hooks do not see the offloaded weights."
                )
            if isinstance(inner, torch.jit.ScriptModule) or is_compiled(inner):
                raise UsageError(
                    f"{name} is compiled ({type(inner).__name__}), so the weights that its backward uses are not "
                    "visible one by one. Train it uncompiled, or leave it out of layers=."
                )
