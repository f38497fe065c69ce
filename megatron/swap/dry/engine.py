"""The engine around a model whose steps run on the dry device, and a tier that holds no bytes."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB
from megatron.swap.devices.base import Device, Stream
from megatron.swap.devices.cuda import expands_segments
from megatron.swap.devices.dry import DryDevice
from megatron.swap.devices.dry_allocator import NO_END
from megatron.swap.engine.overrides import in_backward, override_forward
from megatron.swap.engine.settings import Instruments
from megatron.swap.forecast.gpus import Gpu
from megatron.swap.layers.learned import LearnedLayers
from megatron.swap.memory.tiers.base import Slot, Tier, TierStats
from megatron.swap.models.found_layers import layers_of
from megatron.swap.models.plannable import take_over
from megatron.swap.planning.switch import SwitchingPolicy
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.run.build import Machine, build

# GiB of a GPU that CUDA takes. Runs on H200s that died had reserved up to 139.03 of 139.80 GiB
# (docs/results/h200-trainer.json).
CONTEXT_GIB = 0.75


class DrySlot:
    fence = 0

    def free(self, fence: int = 0) -> None:
        pass


class DryTier(Tier):
    """A tier without bytes, and without a limit."""

    def reserve(self, num_bytes: int) -> DrySlot:
        return DrySlot()

    def write(self, device: Device, stream: Stream, slot: Slot, source: torch.Tensor) -> int:
        return device.copy(stream, [source], [source])

    def read(self, device: Device, stream: Stream, slot: Slot, target: torch.Tensor) -> int:
        return device.copy(stream, [target], [target])

    def expect(self, slots: Iterable[Slot]) -> None:
        pass

    def stats(self) -> TierStats:
        return TierStats(0, 0, 0)

    def close(self) -> None:
        pass


def capacity_gib(gpu: Gpu) -> float:
    """Return the memory that PyTorch can reserve on ``gpu``."""
    return max(0.0, gpu.memory_gib - CONTEXT_GIB)


def dry_device(model: nn.Module, gpu: Gpu, is_limited: bool = False) -> DryDevice:
    """Return a device that holds the model, with PyTorch's allocator, and the memory of ``gpu`` if ``is_limited``."""
    capacity_bytes = int(capacity_gib(gpu) * GIB) if is_limited else NO_END
    device = DryDevice(gpu.name, expands_segments(), gpu.link_gb_s, gpu.link_both_gb_s, capacity_bytes)
    for tensor in (*model.parameters(), *model.buffers()):
        device.hold(tensor.untyped_storage())
    return device


@contextmanager
def planned_layers(
    model: nn.Module, device: DryDevice, policy: SwitchingPolicy, autocast_cache: bool, recorder: Recorder | None = None
) -> Iterator[LearnedLayers]:
    """Return a context in which the engine is around the layers of ``model``, which does not know their order yet."""
    with ExitStack() as undo:
        instruments = Instruments() if recorder is None else Instruments(ranges=recorder.ranges, recorder=recorder)
        engine = build(Settings(policy="auto"), policy, Machine(device, DryTier()), instruments, recomputes=True)
        undo.callback(engine.manager.drain)
        for switched, _ in take_over(model):
            for switch_on in switched:
                undo.callback(switch_on)
        planned = LearnedLayers(layers_of(model), engine.saved_tensors, policy, autocast_cache=autocast_cache)
        undo.callback(planned.remove)
        inner = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with planned.around(model):
                return inner(*args, **kwargs)

        def begins(*_: object) -> None:
            if torch.is_grad_enabled() and not in_backward():
                planned.begin_forward()

        undo.callback(override_forward(model, forward))
        undo.callback(model.register_forward_pre_hook(begins, prepend=True).remove)
        yield planned
