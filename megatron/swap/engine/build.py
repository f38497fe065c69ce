"""Constructs an engine; nothing else does."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.swap.devices.base import Device
from megatron.swap.engine.manager import SwapManager
from megatron.swap.engine.oom_guard import OomGuard
from megatron.swap.engine.policy import Policy
from megatron.swap.engine.recompute import Recomputer
from megatron.swap.engine.recomputed_run import RunChecks
from megatron.swap.engine.saved_tensors import SavedTensors
from megatron.swap.engine.settings import EngineSettings, Instruments
from megatron.swap.memory.tiers.base import Tier


@dataclass(frozen=True)
class Engine:
    """The parts that boundaries and producers need to wrap a model."""

    manager: SwapManager  # called at the beginning and end of each layer
    saved_tensors: SavedTensors  # hooks for the tensors that autograd saves
    recomputer: Recomputer | None  # receives the records of producers; None if nothing is recomputed


def build_engine(
    device: Device, tier: Tier, policy: Policy, settings: EngineSettings | None = None,
    instruments: Instruments | None = None, guard: OomGuard | None = None,
) -> Engine:  # fmt: skip
    """Return an engine that no layer uses yet. The caller begins and ends ``guard``."""
    settings, instruments = settings or EngineSettings(), instruments or Instruments()
    manager = SwapManager(device, tier, policy, settings, instruments, guard)
    checks, recomputer = RunChecks(device), None
    if settings.recomputes:
        recorder = instruments.recorder
        recomputer = Recomputer(
            device, manager.decider, manager.counters, manager.ranges, checks, settings.verify, recorder
        )
    saved_tensors = SavedTensors(manager, device.torch_device, recomputer, checks, instruments, settings.wrappers)
    return Engine(manager, saved_tensors, recomputer)
