"""Swapping for a Megatron model that exists already, in any training loop: without flags, without globals."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.swap.common.instrumentation import Ranges
from megatron.swap.common.settings import Settings
from megatron.swap.common.spelling import INSTALL
from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.built_model import facts_of, unwrapped
from megatron.swap.megatron_lm.checks import check_settings
from megatron.swap.megatron_lm.hints import Built, MegatronHints
from megatron.swap.megatron_lm.memory_needs import MemoryCheck
from megatron.swap.megatron_lm.optimizer_adapter import stepped_params
from megatron.swap.megatron_lm.shared_patches import SHARED
from megatron.swap.native.guarding import build_guard
from megatron.swap.planning.training_steps import check_optimizer
from megatron.swap.run.console import LogConsole
from megatron.swap.run.run import Run
from megatron.swap.run.run_device import RunDevice


@INSTALL.errors()
def install(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Any = None,
    *,
    memory_gib: float | None = None,
    layers: str | Iterable[int] | None = None,
    plan: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Swap the saved tensors of a Megatron model's layers, from the next step on.

    ::

        swapped = swap.install(model, optimizer, memory_gib=60)
        ...                      # the training loop that you have
        print(swapped.stats())
        swapped.close()

    Losses, gradients and weights are bit-equal to a run without swapping. Call it on every rank, before training or
    between two steps, when the model is on its device.

    Args:
        model: this rank's model chunk, or its chunks in the order of the virtual pipeline stages; in Megatron's
            wrappers or without them.
        optimizer: Megatron's or torch's. Its ``step`` ends a training step; where a gradient scaler may skip it, call
            ``Run.step``. Without an optimizer a step ends at the first forward after an optimizer of the model's
            parameters has stepped, or at ``Run.step``.
        memory_gib: most device memory that a step may take: the first steps are measured, then the planner decides.
        layers: layers to swap: ``0-9``, ``0,4-7``, ``every:2``, ``all``, or their numbers.
        plan: a plan file.
        config: more of the ``--swap-`` flags, without the prefix and with underscores: ``{"min_mib": 0.1}``. With
            ``optimizer``, ``{"optimizer": 0.5}`` offloads half of its state.

    While optimizer state is offloaded, main parameters and moments may be read only through the optimizer's
    ``state_dict``. A planner's ``Infeasible`` comes out of the call that ends a step: the optimizer's ``step``, or
    ``step``.

    Raises:
        UsageError: the arguments cannot work for this model; nothing was changed.
        HostMemoryError: the host has less memory than the run needs at least.
        PatchError: this Megatron lacks a symbol that the settings need.
    """
    given = {"memory_gib": memory_gib, "layers": layers, "plan": plan}
    settings = _settings(given, config)
    return swap_built(model, optimizer, settings, LogConsole(INSTALL, log_level=settings.log_level))


def swap_built(model: nn.Module | Iterable[nn.Module], optimizer: Any, settings: Settings, console: LogConsole) -> Run:
    """Return a run that has begun. Arguments are as for ``install``."""
    chunks, is_wrapped = unwrapped(model)
    check_optimizer(optimizer, chunks, stepped_params)
    # A model or an optimizer that another ``install`` has not given back.
    if any(isinstance(other, MegatronHints) and other.uses(chunks, optimizer) for other in SHARED.models):
        raise UsageError("this model or its optimizer swaps already. Call close() of that run first.")
    facts = facts_of(chunks, optimizer)
    if settings.plan is not None:  # the model's batches are not known yet: compared in the first step
        of_plan = settings.plan.model
        facts = replace(facts, seq_length=of_plan.seq_length, micro_batch_size=of_plan.micro_batch_size)
    check_settings(facts, settings)
    if not settings.attaches:
        raise UsageError("nothing is to be swapped. Give memory_gib, layers or plan.")
    if settings.optimizer and optimizer is None:
        raise UsageError(f"optimizer {settings.optimizer}: there is no optimizer. Pass Megatron's.")
    if settings.oom_guard:
        build_guard(on_gpu=torch.cuda.is_available())
    hints = MegatronHints(facts, settings, MemoryCheck(None, None), Built(chunks, optimizer, is_wrapped))
    return Run(settings, hints, console, RunDevice(settings, facts.rank, Ranges())).begin(optimizer)


def _settings(given: Mapping[str, Any], config: Mapping[str, Any] | None) -> Settings:
    """Return all settings. Raises a ``UsageError`` if ``config`` is no mapping or repeats an argument."""
    config = {} if config is None else config
    if not isinstance(config, Mapping):
        raise UsageError(f"config {config!r}: must be a mapping of settings, such as {{'min_mib': 0.1}}.")
    for name, value in given.items():
        if value is not None and name in config:
            raise UsageError(f"{name} is given twice: as an argument and in config. Leave one out.")
    return Settings.of({**given, **config})
