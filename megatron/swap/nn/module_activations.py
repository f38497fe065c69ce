"""The composition root for models that are not Megatron's: activation swapping around a plain PyTorch training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn

from megatron.swap.common.config import SwapConfig, parse_layers
from megatron.swap.common.types import GIB, MIB, UsageError, format_bytes, layer_positions
from megatron.swap.devices.base import Device
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine.build import build_engine
from megatron.swap.engine.layer_hooks import BoundaryOptions, LayerBoundary, in_backward
from megatron.swap.engine.oom_guard import GUARD_HOST_FRACTION, OomGuard, Rescue
from megatron.swap.engine.policy import ManualPolicy, Policy
from megatron.swap.engine.settings import EngineSettings
from megatron.swap.engine.sites import is_hooked
from megatron.swap.memory.host_memory import check_host_request, local_world_size, safe_host_bytes
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.host import HostTier


def activations(
    model: nn.Module | Iterable[nn.Module],
    layers: str | Policy = "all",
    *,
    min_mib: float = 1.0,
    host_gib: float | None = None,
    prefetch_gib: float | None = None,
    verify: bool = False,
    oom_guard: bool = False,
    cpu_delay_ms: float = 0.0,
) -> SwappedActivations:
    """Swap what autograd saves in the layers of ``model``: offload it after forward, reload it before backward.

    ::

        with swap.activations(model, "0-9") as swapped:
            for batch in data:
                loss = model(batch).loss
                loss.backward()
                optimizer.step()
        print(swapped.stats())

    Losses, gradients and weights are bit-equal to a run without swapping. Nothing has to be called between steps.
    Error messages may name the command-line flags: ``--swap-host-gib`` is ``host_gib``.

    Args:
        model: a model, or its layers in the order of forward. The layers of a model are the children of every outermost
            ``nn.ModuleList`` and ``nn.Sequential`` in it, in order. A layer that appears several times counts once.
            To train on a GPU, move the model there first.
        layers: the layers to swap: ``0-9``, ``0,4-7``, ``every:2``, ``all``; or a policy, which is asked by number. The
            last ones before the loss are kept, since backward needs them at once.
        min_mib: smaller storages are kept, unless ``layers`` is a policy, which decides itself.
        host_gib: most host memory to use, in GiB; ``None``: what is safe on this machine.
        prefetch_gib: most GiB that are reloaded ahead of use; ``None``: as much as the largest layer saves.
        verify: compare checksums of every storage that is reloaded.
        oom_guard: when an allocation on the GPU fails, evict saved tensors to the host and retry the allocation.
        cpu_delay_ms: longest random delay of a copy; for a model on the CPU, where threads emulate the copy engines.

    Raises:
        UsageError: the arguments cannot work for this model; nothing was changed.
        HostMemoryError: the host has less memory than ``host_gib``.
    """
    found = _layers(model)
    config = SwapConfig(
        layers=parse_layers(layers, len(found)) if isinstance(layers, str) else frozenset(),
        min_mib=min_mib, host_gib=host_gib, prefetch_gib=prefetch_gib, verify=verify, oom_guard=oom_guard,
        cpu_delay_ms=cpu_delay_ms,
    )  # fmt: skip
    policy = ManualPolicy(config.layers, (), int(min_mib * MIB)) if isinstance(layers, str) else layers
    _check_policy(policy, layers, len(found))
    _check_tail(policy, len(found), num_ahead=1 if prefetch_gib is None else 0)
    return SwappedActivations(found, policy, config, _device_of(found))


@dataclass(frozen=True)
class SwapStats:
    """Totals since the start.

    Attributes:
        out_bytes, in_bytes: copied to host memory, and back.
        stayed_bytes: copied but not released, because others referred to the tensor or it was changed.
        num_late: storages whose reload began only with their layer's backward.
        wait_ms: time that compute waited for copies, as far as the device has run.
        held_bytes: offloaded now.
        host_peak_bytes: most bytes offloaded at once.
        host_booked_bytes: host memory that is reserved.
        num_rescues, rescued_bytes: failed allocations that succeeded after an eviction, and the bytes evicted for them.
    """

    out_bytes: int
    in_bytes: int
    stayed_bytes: int
    num_late: int
    wait_ms: float
    held_bytes: int
    host_peak_bytes: int
    host_booked_bytes: int
    num_rescues: int = 0
    rescued_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.out_bytes)} out, {format_bytes(self.in_bytes)} in, {self.num_late} late, "
            f"{self.wait_ms:.1f} ms waited, at most {format_bytes(self.host_peak_bytes)} in host memory"
        )


class SwappedActivations:
    """Layers whose activations are swapped, until ``close`` or the end of its ``with``. Made by ``activations``.

    Attributes:
        layers: all layers, in order. Layers that are not swapped have boundaries too, to follow forward and backward.
        chosen: numbers of the swapped layers.
    """

    def __init__(self, layers: list[nn.Module], policy: Policy, config: SwapConfig, device: torch.device) -> None:
        budget = safe_host_bytes(local_world_size())
        limit_bytes = budget.safe_bytes
        if config.host_gib is not None:
            limit_bytes = int(config.host_gib * GIB)
            check_host_request(limit_bytes, budget, unchecked=False)
        self.layers = tuple(layers)
        is_swapped = [policy.swaps_layer(number) for number in range(len(layers))]
        self.chosen = tuple(number for number, flag in enumerate(is_swapped) if flag)
        engine_device = _engine_device(device, config.cpu_delay_ms / 1e3)
        guard_bytes = int(GUARD_HOST_FRACTION * limit_bytes) if config.oom_guard else 0
        self._tier = HostTier(HostPool(limit=limit_bytes, pinned=device.type == "cuda", device=device.index))
        guard = OomGuard(engine_device, self._tier.pool, int(config.min_mib * MIB), guard_bytes)
        if config.oom_guard:
            guard.begin()
        settings = EngineSettings(window_bytes=config.window_bytes(None), verify=config.verify)
        engine = build_engine(engine_device, self._tier, policy, settings, guard=guard)
        self._manager = engine.manager
        self._boundaries = [
            _Boundary(
                number,
                layer,
                engine.saved_tensors,
                position,
                BoundaryOptions(hooked=position.swapped or guard.is_on),
            )
            for number, (layer, position) in enumerate(
                zip(layers, layer_positions(is_swapped, ends_in_loss=True), strict=True)
            )
        ]
        self._last: SwapStats | None = None
        self._rescues: list[Rescue] = []

    def stats(self) -> SwapStats:
        """Return the totals until now, or until ``close``. Never waits for the device."""
        if self._last is not None:
            return self._last
        counters, host = self._manager.counters, self._tier.pool.stats
        self._rescues += self._manager.guard.take_rescues()
        totals = counters.totals()
        stayed_bytes = sum(layer.stayed_bytes for layer in counters.layers.values())
        return SwapStats(
            totals.out_bytes, totals.in_bytes, stayed_bytes, totals.num_late, totals.wait_ms,
            host.leased_bytes, host.leased_peak_bytes, host.reserved_bytes,
            len(self._rescues), sum(rescue.freed_bytes for rescue in self._rescues),
        )  # fmt: skip

    def close(self) -> None:
        """Restore the layers' own forward and release host memory. A second call does nothing.

        Call it after the last backward: a backward whose saved tensors are still offloaded raises an error.

        Raises:
            RuntimeError: a copy on the GPU has failed. Host memory is released all the same.
        """
        if self._last is not None:
            return
        for boundary in self._boundaries:
            boundary.remove()
        try:
            self._manager.drain()  # before the figures: afterwards every wait is measured
        finally:
            self._last = self.stats()
            self._tier.close()

    def __enter__(self) -> Self:
        if self._last is not None:  # else a second ``with`` would train without swapping
            raise UsageError("this swap.activations(...) is closed: call swap.activations(model, ...) again.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Boundary(LayerBoundary):
    """The boundary of a layer of any PyTorch model. ``torch.compile`` leaves the layer uncompiled."""

    @torch.compiler.disable
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # The boundary's hooks would hide the layer from the checkpoint, which would save all and recompute nothing.
        if _in_checkpoint():
            if self._position.swapped:
                self._refuse_checkpoint()
            return self._inner(*args, **kwargs)
        if in_backward() and torch.is_grad_enabled() and self._position.swapped:
            self._refuse_checkpoint()
        # Count the finished waits here: without calls of ``stats`` their events would pile up.
        self._manager.counters.wait_ms()
        return super()._forward(*args, **kwargs)

    def _mark(self, result: Any, on_backward: Callable[[], None]) -> Any:
        # Return the same tensors, in their structure: a caller may change them in place.
        for tensor in _tensors(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda _: on_backward())
        return result

    def _refuse_checkpoint(self) -> NoReturn:
        raise UsageError(
            f"layer {self.layer} ({type(self.module).__name__}) is to be swapped, but runs inside an activation "
            "checkpoint, so it saves no tensors. Switch checkpointing off for it "
            "(Hugging Face: model.gradient_checkpointing_disable()) or swap other layers."
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a model whose activations are swapped can be neither copied nor pickled: do that before "
            "swap.activations(...), or after close(). Its state_dict() can."
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, a layer's output: in tuples, lists and mappings of any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _in_checkpoint() -> bool:
    """Whether this forward runs inside a ``torch.utils.checkpoint`` with ``use_reentrant=False``."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _layers(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers of ``model``, or the passed layers, each once.

    Raises:
        UsageError: there are none, or boundaries cannot be put around them.
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise UsageError(
            "nn.DataParallel runs copies of the layers on other GPUs, which have no boundaries. Use "
            "torch.nn.parallel.DistributedDataParallel, one process for each GPU."
        )
    # A module is never taken as a list of layers: nn.ModuleList is iterable, but may contain another one.
    found = list(dict.fromkeys(_stacked(model) if isinstance(model, nn.Module) else _given(model)))
    name = type(model).__name__
    if not found:
        raise UsageError(
            f"no layers were found in {name}: it has no nn.ModuleList and no nn.Sequential with modules in it. Pass "
            "the layers themselves, in the order of forward: swap.activations([model.block1, model.block2])."
        )
    numbers = {layer: number for number, layer in enumerate(found)}
    for number, layer in enumerate(found):
        what = f"layer {number} of {name} ({type(layer).__name__})"
        for inner in layer.modules():
            if inner is not layer and inner in numbers:
                raise UsageError(
                    f"{what} contains layer {numbers[inner]}: layers stand one after the other, never inside each "
                    "other. Pass one of both."
                )
            if is_hooked(inner) or isinstance(getattr(inner.forward, "__self__", None), LayerBoundary):
                raise UsageError(f"{what} is swapped already: close() the other swap.activations(...) first.")
            if isinstance(inner, torch.jit.ScriptModule) or _is_compiled(inner):
                raise UsageError(
                    f"{what} is compiled ({type(inner).__name__}), so its saved tensors are not visible one by one. "
                    "Swap it uncompiled, and compile the whole model instead: swapped layers then run uncompiled."
                )
    return found


def _stacked(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the children of the outermost stacks; of a container without a forward its children instead."""
    is_stack = isinstance(module, nn.ModuleList | nn.Sequential)
    for child in module.children():
        if is_stack and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _stacked(child)


def _given(layers: Iterable[nn.Module]) -> list[nn.Module]:
    try:
        found = list(layers)
    except TypeError:
        found = [layers]  # type: ignore[list-item]
    for layer in found:
        if not isinstance(layer, nn.Module) or isinstance(layer, nn.ModuleList | nn.ModuleDict):
            raise UsageError(
                f"swap.activations was given {type(layer).__name__} as a layer: it must be an nn.Module with a "
                "forward. Pass a model, or its layers as a list of modules."
            )
    return found


def _is_compiled(module: nn.Module) -> bool:
    # torch.compile(module) wraps it, module.compile() notes it. Their types would import the compiler.
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _check_policy(policy: Policy, given: str | Policy, num_layers: int) -> None:
    if not isinstance(policy, Policy):
        raise UsageError(
            f"swap.activations was given {given!r} as layers: it must be a text such as '0-9' or 'all', or a Policy."
        )
    if not any(map(policy.swaps_layer, range(num_layers))):
        raise UsageError(f"layers {given!r}: none of the {num_layers} layers would be swapped. Name one, or 'all'.")
    if any(map(policy.recomputes_whole, range(num_layers))):
        raise UsageError(
            f"layers {given!r}: recomputes whole layers, for which Megatron's layers are needed. Put "
            "torch.utils.checkpoint around them in the model, and swap others."
        )


def _check_tail(policy: Policy, num_layers: int, num_ahead: int) -> None:
    """Refuse a policy that would swap only trailing layers, which are kept. ``num_ahead``: least layers prefetched."""
    is_swapped = [policy.swaps_layer(number) for number in range(num_layers)]
    positions = layer_positions(is_swapped, ends_in_loss=True)
    if all(position.is_trailing_kept(num_ahead) for position in positions if position.swapped):
        raise UsageError(
            f"of {num_layers} layers only the last would be swapped, and those are kept: backward needs them at once. "
            "Swap earlier ones, or pass smaller layers: their children in the order of forward."
        )


def _device_of(layers: list[nn.Module]) -> torch.device:
    """Return the device that all layers are on.

    Raises:
        UsageError: on several devices, on none, or on one that is neither the CPU nor CUDA.
    """
    found = {tensor.device for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    if len(found) != 1 or next(iter(found)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, found))) or "no device: none has parameters"
        raise UsageError(
            f"the layers are on {names}. They must all be on one, the CPU or a CUDA GPU: move the model there first, "
            "and swap the layers of each GPU by a call of its own."
        )
    return found.pop()


def _engine_device(device: torch.device, longest_delay_s: float) -> Device:
    if device.type == "cpu":
        return EmulatedDevice(longest_delay_s)
    with torch.cuda.device(device):
        return CudaDevice()
