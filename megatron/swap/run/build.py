"""Builds the engine of a run, for every kind of model and machine. Nothing else does."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MIB
from megatron.swap.devices.base import Device
from megatron.swap.engine.build import Engine, build_engine
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.settings import EngineSettings, Instruments
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_budget import HostMemoryBudget
from megatron.swap.memory.host_memory import available_host_bytes
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.base import Tier
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.memory.tiers.spill import spill_tier
from megatron.swap.run.host_share import HostShare


@dataclass(frozen=True)
class Machine:
    """The device of a rank, and the memory that it offloads to. A dry run has a device and a tier without bytes."""

    device: Device
    tier: Tier  # receives offloaded storages: `host_tier`, or with a disk a tier that spills there


@dataclass(frozen=True)
class RealMachine(Machine):
    """A machine with host memory."""

    host_tier: Tier  # the tier on `pool` alone; the link's speed is measured with it
    pool: HostPool  # host memory for activations
    guard: OomGuard


def real_machine(
    settings: Settings,
    device: Device,
    share: HostShare,
    budget: HostMemoryBudget,
    disk: DiskFile | None = None,
) -> RealMachine:
    """Return this rank's machine.

    ``share`` is the host memory that the rank may take, divided; ``budget`` is the same memory. The pool cannot have
    bytes that others, such as optimizer state, reserve in it. ``disk`` is the file behind host memory.
    """
    index = device.torch_device.index if device.torch_device.type == "cuda" else None
    pool = HostPool(
        limit=budget, pinned=device.torch_device.type == "cuda", device=index,
        available_bytes=None if settings.host_unchecked else available_host_bytes,
    )  # fmt: skip
    host_tier = HostTier(pool)
    tier = host_tier if disk is None else spill_tier(host_tier, disk, share.disk_buffer_bytes)
    if not settings.offload_fraction:  # else optimizer state, whose size is fixed, reserves its memory first
        pool.reserve(min(share.least_bytes, pool.limit_bytes))
    guard = OomGuard(device, pool, int(settings.min_mib * MIB), share.guard_bytes)
    if settings.oom_guard:
        guard.begin()
    return RealMachine(device, tier, host_tier, pool, guard)


def build(
    settings: Settings,
    policy: Policy,
    machine: Machine,
    instruments: Instruments,
    *,
    recomputes: bool = False,
    wrappers: WrapperRules | None = None,
) -> Engine:
    """Return the engine of a run. ``recomputes`` and ``wrappers`` as for ``EngineSettings``."""
    window_bytes = settings.window_bytes(settings.plan)
    of_engine = EngineSettings(
        window_bytes=window_bytes, verify=settings.verify, recomputes=recomputes, wrappers=wrappers
    )
    guard = machine.guard if isinstance(machine, RealMachine) else None
    return build_engine(machine.device, machine.tier, policy, of_engine, instruments, guard)
