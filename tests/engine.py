"""Shared parts of the engine's tests: a small transformer stack, the engine around it, schedules."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.types import ACTIVATION, KIB, LINEAR, MIB, NORM, LayerPosition, Site
from megatron.swap.devices.base import Device
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.engine import offload as offload_module
from megatron.swap.engine.build import build_engine
from megatron.swap.engine.handle import Group, Handle
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.policy import ManualPolicy, Policy
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.settings import EngineSettings, Instruments
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.layers.boundary import Boundary
from megatron.swap.layers.layers import Layers
from megatron.swap.layers.run import LayerSpec, Rerun
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.base import Tier
from megatron.swap.memory.tiers.disk import DiskTier
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.memory.tiers.spill import SpillTier
from megatron.swap.profiling.observer import Observer
from megatron.swap.profiling.recorder import Recorder
from tests.lazy_device import LazyDevice

HIDDEN = 32
TOKENS = 64


class Attention(nn.Module):
    """q, k and v are views of one storage, with offsets, strides and transposes."""

    def __init__(self, hidden: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.linear_qkv = nn.Linear(hidden, 3 * hidden)
        self.linear_proj = nn.Linear(hidden, hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, width = hidden.shape
        qkv = self.linear_qkv(hidden).view(tokens, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(0, 1) for part in qkv.unbind(1))
        context = (query @ key.transpose(1, 2) * 0.25).softmax(-1) @ value
        return self.linear_proj(context.transpose(0, 1).reshape(tokens, width))


class Mlp(nn.Module):
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden, 4 * hidden)
        self.linear_fc2 = nn.Linear(4 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.activation = functional.gelu

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear_fc2(self.activation(self.linear_fc1(hidden))))


class Layer(nn.Module):
    def __init__(self, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, dropout)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.norm1(hidden_states))
        return hidden_states + self.mlp(self.norm2(hidden_states))


def stack(
    num_layers: int = 4, make: Callable[[], nn.Module] = Layer, dtype: torch.dtype | None = None
) -> nn.ModuleList:
    torch.manual_seed(7)
    return nn.ModuleList([make() for _ in range(num_layers)]).to(dtype)


def batch(number: int = 0, dtype: torch.dtype | None = None, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(100 + number)).to(dtype)


def wrap(layer: nn.Module, recomputer: Recomputer) -> Iterator[Callable[[], None]]:
    """Record norms, activation functions, linear_qkv and linear_fc1 as producers. Yield functions that undo this."""
    for path, module in layer.named_modules():
        if isinstance(module, nn.LayerNorm) or path.endswith(("linear_qkv", "linear_fc1")):
            kind = NORM if isinstance(module, nn.LayerNorm) else LINEAR
            module.forward = recomputer.recorded(kind, module.forward)  # type: ignore[method-assign]
            yield partial(delattr, module, "forward")
        elif "activation" in vars(module):
            plain = module.activation
            module.activation = recomputer.recorded(ACTIVATION, plain)
            yield partial(setattr, module, "activation", plain)


EVERYTHING = ManualPolicy(range(1000), (), 0)
"""A policy that offloads every eligible storage."""


def save(manager: SwapManager, tensor: torch.Tensor, site: Site, group: Group) -> tuple[Handle, int] | None:
    """Save ``tensor`` as autograd would. Return its handle and its number there; ``None``: it has no handle."""
    storage, offload = tensor.untyped_storage(), manager.offload
    if (handle := offload.find(storage)) is None:
        handle = offload.new_handle(storage, site, group, manager.decider.decide(site, storage, group.position))
    return None if handle is None else (handle, offload.join(tensor, handle, group))


class _Swaps:
    """A policy whose swapped and whole layers are others than it says."""

    def __init__(self, policy: Policy, swapped: Collection[int], whole: Collection[int]) -> None:
        self._policy, self._swapped, self._whole = policy, swapped, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def swaps_layer(self, layer: int) -> bool:
        return layer in self._swapped

    def recomputes_whole(self, layer: int) -> bool:
        return layer in self._whole or self._policy.recomputes_whole(layer)


class _Layers(Layers):
    def __init__(
        self, saved_tensors: Any, policy: Policy, swapped: Collection[int], whole: Collection[int], *, hooks_all: bool
    ) -> None:
        super().__init__(saved_tensors, _Swaps(policy, swapped, whole))  # type: ignore[arg-type]
        self._hooks_all = hooks_all

    def _boundary(self, spec: LayerSpec, hooked: bool) -> Boundary:
        return super()._boundary(spec, hooked or self._hooks_all)

    def position(self, layer: int) -> LayerPosition:
        return self._runs[self.boundaries[layer]][0].position


class Engine:
    """The engine around ``layers``, on a machine without a GPU. ``close`` removes it from the layers.

    Args:
        swapped: layers to swap; all by default.
        policy: instead of the choice by ``swapped``, ``modules``, ``min_bytes``, ``recompute`` and ``whole``.
        recompute: producers whose outputs are recomputed.
        whole: layers that are recomputed whole.
        chunks: how many layers each model chunk has; only the last one ends in the loss.
        recorded: hooks all layers for ``recorder``, which takes the observer's bytes for the device's memory.
        host_bytes, disk: host memory, and what takes what it has no room for.
        commit_bytes: instead of the product's 16 MiB, so that copies start inside a layer.
        guarded: what nobody uses is taken when an allocation fails.
        wrappers: the wrapper tensors that are taken apart.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        swapped: Iterable[int] | None = None,
        *,
        device: Device | None = None,
        modules: Sequence[str] = (),
        min_bytes: int = 1024,
        window_bytes: int | None = None,
        verify: bool = False,
        ends_in_loss: bool = True,
        chunks: Sequence[int] | None = None,
        commit_bytes: int = offload_module.COMMIT_BYTES,
        observer: Observer | None = None,
        ranges: Ranges | None = None,
        policy: Policy | None = None,
        recompute: Collection[str] = (),
        whole: Collection[int] = (),
        recorded: bool = False,
        host_bytes: int = 256 * MIB,
        disk: DiskFile | None = None,
        guarded: bool = False,
        wrappers: WrapperRules | None = None,
    ) -> None:
        layers = list(layers)
        numbers = range(len(layers))
        if policy is not None and swapped is None:
            swapped = filter(policy.swaps_layer, numbers)
        self.swapped = set(numbers if swapped is None else swapped)
        self.device = device if device is not None else EmulatedDevice(longest_delay_s=0.0005)
        self.pool = HostPool(limit=host_bytes, slab_bytes=min(MIB, host_bytes), pinned=False, poison=True)
        host = HostTier(self.pool)
        self.tier: Tier = host if disk is None else SpillTier(host, DiskTier(disk, 4 * KIB, pinned=False))
        policy = policy or ManualPolicy(self.swapped, modules, min_bytes, recompute)
        self.guard = OomGuard(self.device, self.pool, min_bytes)
        if guarded:
            self.guard.begin()
        ranges = ranges or Ranges()
        self.recorder = None
        if recorded:
            assert observer is not None
            self.recorder = Recorder(self.device, ranges, observer.take_peak)
        engine = build_engine(
            self.device, self.tier, policy,
            EngineSettings(window_bytes=window_bytes, verify=verify, recomputes=True, wrappers=wrappers),
            Instruments(ranges=ranges, observer=observer, recorder=self.recorder), self.guard,
        )  # fmt: skip
        assert engine.recomputer is not None
        self.manager, self.saved_tensors, self.recomputer = engine.manager, engine.saved_tensors, engine.recomputer
        self._undo = [undo for layer in layers for undo in wrap(layer, self.recomputer)]
        self.bounded = _Layers(self.saved_tensors, policy, self.swapped, whole, hooks_all=recorded)
        rerun = Rerun(checkpoint=lambda: partial(checkpoint, use_reentrant=True))
        numbered = iter(enumerate(layers))
        for number, size in enumerate(chunks := chunks or [len(layers)]):
            here = [LayerSpec(module=layer, number=i, rerun=rerun) for i, layer in itertools.islice(numbered, size)]
            self.bounded.install(here, ends_in_loss=ends_in_loss and number == len(chunks) - 1)
        self._commit_bytes, offload_module.COMMIT_BYTES = offload_module.COMMIT_BYTES, commit_bytes

    def position(self, layer: int) -> LayerPosition:
        return self.bounded.position(layer)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> Any:
        return self.manager.counters

    @property
    def num_leases(self) -> int:
        return self.pool.stats.num_leases

    def close(self) -> None:
        offload_module.COMMIT_BYTES = self._commit_bytes
        self.bounded.remove()
        for undo in self._undo:
            undo()
        self.manager.drain()
        self.tier.close()


def forward(layers: Iterable[nn.Module], hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden = layer(hidden)
    return hidden


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


@dataclass
class Result:
    losses: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor | None] = field(default_factory=list)

    def same_as(self, other: Result) -> bool:
        pairs = [*zip(self.losses, other.losses, strict=True), *zip(self.grads, other.grads, strict=True)]
        return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


class HeldEvent:
    """Blocks a stream of the emulation until the test opens it."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def has_passed(self) -> bool:
        return self._opened.is_set()

    def synchronize(self) -> None:
        assert self._opened.wait(timeout=30), "the test never opened this event"


Step = tuple[str, int, int]
"""``("F" or "B", chunk, micro-batch)``."""


def one_after_the_other(num_micro_batches: int) -> list[Step]:
    """Return F0 B0 F1 B1 …: gradient accumulation without a pipeline."""
    return [step for mb in range(num_micro_batches) for step in (("F", 0, mb), ("B", 0, mb))]


def one_forward_one_backward(num_micro_batches: int, warmup: int = 2) -> list[Step]:
    """Return F0 F1 B0 F2 B1 …: a pipeline stage with ``warmup`` micro-batches in flight."""
    steps: list[Step] = [("F", 0, mb) for mb in range(min(warmup, num_micro_batches))]
    for mb in range(num_micro_batches):
        steps.append(("B", 0, mb))
        if mb + warmup < num_micro_batches:
            steps.append(("F", 0, mb + warmup))
    return steps


def interleaved(num_micro_batches: int, num_chunks: int = 2, group: int = 2) -> list[Step]:
    """Return chunks of a stage in turn, ``group`` micro-batches each. F of the next round begins before B of this one
    ends."""
    steps: list[Step] = []
    for first in range(0, num_micro_batches, group):
        here = range(first, min(first + group, num_micro_batches))
        steps += [("F", chunk, mb) for chunk in range(num_chunks) for mb in here]
        if first + group < num_micro_batches:  # the next round's first chunk starts early
            steps.append(("F", 0, first + group))
        steps += [("B", chunk, mb) for chunk in reversed(range(num_chunks)) for mb in here]
    seen: set[Step] = set()
    return [step for step in steps if not (step in seen or seen.add(step))]  # type: ignore[func-returns-value]


def train_step(
    layers: nn.ModuleList,
    schedule: Sequence[Step],
    chunks: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 3,
) -> Result:
    """Run one accumulation step in the order of ``schedule``. Chunks are separate graphs, as in pipeline stages."""
    layers.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    result = Result()
    parts, first = [], 0
    for size in chunks or [len(layers)]:
        parts.append(list(layers)[first : first + size])
        first += size
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    gradients: dict[tuple[int, int], torch.Tensor] = {}
    for what, chunk, mb in schedule:
        if what == "F":
            received = batch(mb, dtype) if chunk == 0 else outputs[chunk - 1, mb].detach().clone()
            inputs[chunk, mb] = received.requires_grad_()
            output = forward(parts[chunk], received)
            if chunk == len(parts) - 1:
                output = loss_of(output)
                result.losses.append(output.detach())
            outputs[chunk, mb] = output
        else:
            output = outputs.pop((chunk, mb))
            torch.autograd.backward(output, gradients.pop((chunk + 1, mb), None))
            del output  # nothing of a micro-batch outlives its backward
            gradients[chunk, mb] = inputs.pop((chunk, mb)).grad
    result.grads = [*(parameter.grad for parameter in layers.parameters()), *gradients.values()]
    return result


def one_step(layers: nn.ModuleList) -> Result:
    return train_step(layers, one_after_the_other(2))


def result(layers: nn.ModuleList, *losses: torch.Tensor, more: Iterable[torch.Tensor | None] = ()) -> Result:
    return Result([loss.detach() for loss in losses], [*more, *(parameter.grad for parameter in layers.parameters())])


def compare(
    layers: nn.ModuleList, run: Callable[[nn.ModuleList], Result] = one_step, num_steps: int = 2, *,
    offloads: bool = True, **options: Any,
) -> Engine:  # fmt: skip
    """Check that each ``run`` is equal to the bit with the engine, which learns the order in the first. Return the
    closed engine with its counters."""
    plain = run(copy.deepcopy(layers))
    with Engine(layers, **options) as engine:
        for _ in range(num_steps):
            assert run(layers).same_as(plain)
            assert engine.num_leases == 0, "leases were left over"
        assert engine.counters.out_bytes > 0 or not offloads, "nothing was offloaded"
    assert not getattr(engine.device, "violations", [])
    return engine


Run = Callable[[nn.ModuleList, Engine | None], Result]
"""Trains layers under an engine, or without one."""


def wrongs(run: Run, make: Callable[[], nn.Module] = Layer, **options: object) -> list[str]:
    """Return what is wrong with ``run`` under the engine: differences from the run without it, NaNs, errors, races."""
    layers = stack(6, make)
    plain = run(copy.deepcopy(layers), None)
    engine = Engine(layers, **{"device": LazyDevice(), **options})
    found: list[str] = []
    try:
        swapped = run(layers, engine)
        if not swapped.same_as(plain):
            found.append("different")
        if any(grad is not None and not grad.isfinite().all() for grad in swapped.grads):
            found.append("not finite")
        assert engine.counters.out_bytes > 0
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    finally:
        engine.close()
    return found + getattr(engine.device, "violations", [])


def watch(listener: Any, chunk: nn.Module) -> Callable[[], None]:
    """Tell a recorder or a planner of the forwards of ``chunk``, as a run does. Return the end of that."""
    listener.add_chunk(chunk)
    before = chunk.register_forward_pre_hook(lambda *_: listener.chunk_begins(chunk), prepend=True)
    behind = chunk.register_forward_hook(lambda *_: listener.chunk_ends(chunk))

    def end() -> None:
        before.remove()
        behind.remove()

    return end
