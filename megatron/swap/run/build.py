"""The parts of a run, and its engine, built for every kind of model and machine. Nothing else builds one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MIB
from megatron.swap.devices.base import Device
from megatron.swap.engine.build import Engine, build_engine
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.policy import Policy, policy_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.settings import EngineSettings, Instruments
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.layers.layers import Layers
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_budget import HostMemoryBudget, Reservation
from megatron.swap.memory.host_memory import available_host_bytes
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.base import Tier
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.memory.tiers.spill import spill_tier
from megatron.swap.models.hints import ModelHints
from megatron.swap.planning.target import PlanTarget
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.reporting.plan_run import PlanRun
from megatron.swap.run.host_share import HostShare, host_share
from megatron.swap.run.run_device import RunDevice


@dataclass(frozen=True)
class Machine:
    """The device of a rank, and the memory that it offloads to. A dry run has a device and a tier without bytes."""

    device: Device
    tier: Tier  # receives offloaded storages: `host_tier`, or with a disk a tier that spills there


@dataclass(frozen=True)
class RealMachine(Machine):
    host_tier: Tier  # the tier on `pool` alone; the link's speed is measured with it
    pool: HostPool  # host memory for activations
    guard: OomGuard


def real_machine(
    settings: Settings, device: Device, share: HostShare, budget: HostMemoryBudget, disk: DiskFile | None = None
) -> RealMachine:
    """Return this rank's machine. ``share`` and ``budget`` are its host memory, ``disk`` is the file behind that."""
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
    settings: Settings, policy: Policy, machine: Machine, instruments: Instruments, *, recomputes: bool = False,
    wrappers: WrapperRules | None = None,
) -> Engine:  # fmt: skip
    """Return the engine of a run. ``recomputes`` and ``wrappers`` as for ``EngineSettings``."""
    window_bytes = settings.window_bytes(settings.plan)
    of_engine = EngineSettings(
        window_bytes=window_bytes, verify=settings.verify, recomputes=recomputes, wrappers=wrappers
    )
    guard = machine.guard if isinstance(machine, RealMachine) else None
    return build_engine(machine.device, machine.tier, policy, of_engine, instruments, guard)


@dataclass(frozen=True)
class Planned:
    """Parts that follow from the settings and the model alone, before anything is on the device."""

    target: PlanTarget | None  # of a run that plans itself, or None
    policy: Policy  # decides about every saved tensor
    kinds: tuple[str, ...]  # producers whose outputs may be recomputed
    swaps: bool  # any layer of the model may be swapped
    host: HostShare  # host memory and disk that this rank may take
    state_memory: Reservation  # of optimizer state: the most it may take, its size once the optimizer is built
    disk: DiskFile | None  # the file behind host memory, or None
    plan_run: PlanRun | None  # compares the run with its plan, or None

    @classmethod
    def of(cls, settings: Settings, hints: ModelHints, run_device: RunDevice, policy: Policy | None = None) -> Planned:
        """Return the parts, or raise a ``UsageError`` or ``HostMemoryError`` if memory or a disk is missing."""
        kinds = hints.kinds(settings)
        target = None
        if settings.auto:
            target = PlanTarget(
                settings, hints.describe, run_device.memory_gib, kinds, hints.recomputes_layers, hints.timeout_minutes,
                hints.remedy,
            )  # fmt: skip
        if policy is None:
            policy = policy_of(settings, hints.num_layers) if target is None else target.policy
        swaps = any(map(policy.swaps_layer, range(hints.num_layers)))
        wants_plan = settings.plan is not None or (settings.save_plan is not None and not settings.auto)
        host = host_share(settings, swaps, hints.least_host_bytes(settings), hints.capacity)
        state_memory = host.reserve_state(settings)
        plan_run = PlanRun(settings, hints.describe) if wants_plan else None
        # The last, since nothing closes the file if a later part cannot be made.
        disk = DiskFile(settings.disk_dir, host.disk_bytes) if settings.disk_dir is not None else None
        return cls(target, policy, kinds, swaps, host, state_memory, disk, plan_run)


@dataclass(frozen=True)
class Parts:
    """The engine of this rank, and the parts that it uses."""

    machine: RealMachine
    engine: Engine
    recorder: Recorder
    layers: Layers

    @property
    def manager(self) -> SwapManager:
        return self.engine.manager

    @property
    def recomputer(self) -> Recomputer | None:
        return self.engine.recomputer
