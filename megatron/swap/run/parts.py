"""The parts of a run that swap activations. They are built from the settings when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.swap.autotune.target import PlanTarget
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.plan import Model
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import MIB, SwapError
from megatron.swap.engine.build import Engine, build_engine
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.policy import Policy, policy_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.settings import EngineSettings, Instruments
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.checks import device_memory_gib, recompute_kinds
from megatron.swap.megatron_lm.host_share import HostShare, host_share
from megatron.swap.megatron_lm.layer import Boundaries
from megatron.swap.megatron_lm.layer_checkpoint import can_recompute_layers
from megatron.swap.megatron_lm.memory_needs import MemoryCheck
from megatron.swap.megatron_lm.optimizer_swap import OffloadSettings, offload_settings
from megatron.swap.megatron_lm.producers import Producers
from megatron.swap.megatron_lm.quantized import wrapper_rules
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_budget import Reservation
from megatron.swap.memory.host_memory import available_host_bytes
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.memory.tiers.base import Tier
from megatron.swap.memory.tiers.host import HostTier
from megatron.swap.memory.tiers.spill import spill_tier
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.reporting.plan_run import PlanRun
from megatron.swap.run.run_device import RunDevice


@dataclass(frozen=True)
class Planned:
    """Parts that follow from the settings alone, before there is a model.

    Attributes:
        num_layers: of the whole model.
        needs: what the model needs beside what there is, in words; ``None``: it is not known.
        target: what a run that plans itself aims at; ``None``: it does not plan itself.
        policy: decides about every saved tensor.
        kinds: producers whose outputs may be recomputed.
        swaps: whether any layer of the model may be swapped.
        host: the host memory and disk that this rank may take.
        state_memory: reservation in this rank's host memory budget: what optimizer state may take, and once the
            optimizer is built, what it takes.
        disk: the file behind host memory; ``None``: no disk.
        offload: settings of the optimizer state that is offloaded; ``None``: none is.
        plan_run: compares the run with its plan; ``None``: no comparison is wanted.
        wrappers: rules for the wrapper tensors of low precision; ``None``: there are none.
    """

    num_layers: int
    needs: str | None
    target: PlanTarget | None
    policy: Policy
    kinds: tuple[str, ...]
    swaps: bool
    host: HostShare
    state_memory: Reservation
    disk: DiskFile | None
    offload: OffloadSettings | None
    plan_run: PlanRun | None
    wrappers: WrapperRules | None

    @classmethod
    def of(
        cls, facts: MegatronFacts, settings: Settings, memory: MemoryCheck, describe: Callable[[], Model]
    ) -> Planned:
        """Return what follows from the facts and the settings.

        Args:
            memory: what the model needs beside what there is.
            describe: returns the model.

        Raises:
            UsageError, HostMemoryError: the settings ask for memory or a disk that there is not.
        """
        kinds = recompute_kinds(facts, settings)
        target = None
        if settings.auto:
            target = PlanTarget(
                settings, describe, device_memory_gib(facts, settings), kinds, can_recompute_layers(facts),
                facts.distributed_timeout_minutes,
            )  # fmt: skip
        policy = policy_of(settings, facts.num_layers) if target is None else target.policy
        swaps = any(map(policy.swaps_layer, range(facts.num_layers)))
        wants_plan = settings.plan is not None or (settings.save_plan is not None and not settings.auto)
        host = host_share(settings, facts, swaps, memory.capacity)
        state_memory = host.reserve_state(settings)
        disk = DiskFile(settings.disk_dir, host.disk_bytes) if settings.disk_dir is not None else None
        offload = None
        if settings.offload_fraction:
            offload = offload_settings(settings, facts, state_memory.num_bytes, disk)
        return cls(
            facts.num_layers, memory.line, target, policy, kinds, swaps, host, state_memory, disk, offload,
            plan_run=PlanRun(settings, describe) if wants_plan else None,
            wrappers=wrapper_rules() if facts.fp8 or facts.fp4 else None,
        )  # fmt: skip


@dataclass(frozen=True)
class ActivationParts:
    """The engine of this rank, and the parts that it uses.

    Attributes:
        pool: host memory for activations.
        host_tier: the tier on ``pool`` alone; the link's speed is measured with it.
        tier: receives offloaded storages: ``host_tier``, or with a disk a tier that spills there.
    """

    pool: HostPool
    host_tier: Tier
    tier: Tier
    guard: OomGuard
    engine: Engine
    recorder: Recorder
    boundaries: Boundaries

    @property
    def manager(self) -> SwapManager:
        """The engine's manager."""
        return self.engine.manager

    @property
    def recomputer(self) -> Recomputer | None:
        """The engine's recomputer; ``None``: nothing is recomputed."""
        return self.engine.recomputer

    @classmethod
    def build(
        cls,
        settings: Settings,
        planned: Planned,
        run_device: RunDevice,
        ranges: Ranges,
        take_peak: Callable[[], tuple[int, int]],
        on_tier_full: Callable[[SwapError], None] | None,
    ) -> ActivationParts:
        """Build the parts on this rank's device.

        Args:
            take_peak: returns the most bytes in use since the last call, and those in use now.
            on_tier_full: called when the tier has no room for a storage; ``None``: that is an error.
        """
        device, on_gpu = run_device.device, torch.cuda.is_available()
        pool = HostPool(
            limit=planned.state_memory.budget, pinned=on_gpu,
            available_bytes=None if settings.host_unchecked else available_host_bytes,
        )  # fmt: skip
        host_tier = HostTier(pool)
        tier: Tier = host_tier
        if planned.disk is not None and planned.swaps:
            tier = spill_tier(host_tier, planned.disk, planned.host.disk_buffer_bytes)
        if not settings.offload_fraction:  # else optimizer state, whose size is fixed, reserves its memory first
            pool.reserve(min(planned.host.least_bytes, pool.limit_bytes))
        guard = OomGuard(device, pool, int(settings.min_mib * MIB), planned.host.guard_bytes)
        recorder = Recorder(device, ranges, take_peak)
        of_engine = EngineSettings(
            window_bytes=settings.window_bytes(settings.plan), verify=settings.verify, recomputes=bool(planned.kinds),
            wrappers=planned.wrappers,
        )
        instruments = Instruments(
            ranges=ranges, observer=run_device.observer, recorder=recorder,
            on_saved=None if planned.plan_run is None else planned.plan_run.note, on_full=on_tier_full,
        )  # fmt: skip
        engine = build_engine(device, tier, planned.policy, of_engine, instruments, guard)
        if settings.oom_guard:
            guard.begin()
        producers = None if engine.recomputer is None else Producers(engine.recomputer, planned.kinds)
        boundaries = Boundaries(engine.saved_tensors, planned.policy, producers)
        return cls(pool, host_tier, tier, guard, engine, recorder, boundaries)
