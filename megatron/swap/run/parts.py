"""The parts of a run that swap activations. They are built from the settings when the model is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.swap.autotune.target import PlanTarget
from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.plan import Model
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import SwapError
from megatron.swap.engine.build import Engine
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.policy import Policy, policy_of
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.wrapper_tensors import WrapperRules
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.checks import device_memory_gib, recompute_kinds
from megatron.swap.megatron_lm.layer import MegatronLayers
from megatron.swap.megatron_lm.layer_checkpoint import can_recompute_layers
from megatron.swap.megatron_lm.least_saved import least_host_bytes
from megatron.swap.megatron_lm.memory_needs import MemoryCheck
from megatron.swap.megatron_lm.optimizer_swap import OffloadSettings, offload_settings
from megatron.swap.megatron_lm.producers import Producers
from megatron.swap.megatron_lm.quantized import wrapper_rules
from megatron.swap.memory.disk_file import DiskFile
from megatron.swap.memory.host_budget import Reservation
from megatron.swap.profiling.recorder import Recorder
from megatron.swap.reporting.plan_run import PlanRun
from megatron.swap.run.build import RealMachine, build, real_machine
from megatron.swap.run.host_share import HostShare, host_share
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
        host = host_share(settings, swaps, least_host_bytes(settings, facts), memory.capacity)
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
    """The engine of this rank, and the parts that it uses."""

    machine: RealMachine
    engine: Engine
    recorder: Recorder
    layers: MegatronLayers

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
        device = run_device.device
        disk = planned.disk if planned.swaps else None
        machine = real_machine(settings, device, planned.host, planned.state_memory.budget, disk)
        recorder = Recorder(device, ranges, take_peak)
        engine = build(
            settings, planned.policy, machine, ranges=ranges, observer=run_device.observer, recorder=recorder,
            recomputes=bool(planned.kinds), wrappers=planned.wrappers,
            on_saved=None if planned.plan_run is None else planned.plan_run.note, on_full=on_tier_full,
        )  # fmt: skip
        producers = None if engine.recomputer is None else Producers(engine.recomputer, planned.kinds)
        return cls(machine, engine, recorder, MegatronLayers(engine.saved_tensors, planned.policy, producers))
