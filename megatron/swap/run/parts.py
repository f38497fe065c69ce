"""The parts of a run: those that follow from settings and model, and those that are built on the device."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.common.settings import Settings
from megatron.swap.engine.build import Engine
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.policy import Policy, policy_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.layers.layers import Layers
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_budget import Reservation
from megatron.swap.models.hints import ModelHints
from megatron.swap.planning.target import PlanTarget
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.reporting.plan_run import PlanRun
from megatron.swap.run.build import RealMachine
from megatron.swap.run.host_share import HostShare, host_share
from megatron.swap.run.run_device import RunDevice


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
    def of(
        cls, settings: Settings, hints: ModelHints, run_device: RunDevice, policy: Policy | None = None
    ) -> Planned:
        """Return the parts that follow from the settings and the model.

        Raises a ``UsageError`` or ``HostMemoryError`` if the settings ask for memory or a disk that is missing.
        """
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
        """The engine's manager."""
        return self.engine.manager

    @property
    def recomputer(self) -> Recomputer | None:
        """The engine's recomputer, or None if nothing is recomputed."""
        return self.engine.recomputer
