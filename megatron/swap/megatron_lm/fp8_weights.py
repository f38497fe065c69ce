"""Linear layers in 8 bits that keep no copies of their weights: by a flag, or where the planner predicts a faster step.

TransformerEngine makes two 8-bit layouts of each weight in the first micro-batch of a step and keeps them. Under FSDP2
it does not: forward makes the layout that it reads, and backward makes its own from the parameter. That is what layers
do here, without FSDP2. A weight does not change within a step, so its copies are equal to the bit.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron.swap.common.plan import DROPPED, KEPT
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.flags import UNSUPPORTED, read_flags
from megatron.swap.forecast.fp8 import why_copies_stay
from megatron.swap.forecast.gpus import gpu_of
from megatron.swap.forecast.options import DISK, PLANNED, STATE, of_training
from megatron.swap.megatron_lm.arguments import device_memory_gib
from megatron.swap.patches import registry, te_restored_weight

PACKAGE = "transformer_engine.pytorch"
FLAG = "_is_fsdp2"
"""Attribute of TransformerEngine's modules that says whether FSDP2 has wrapped them. Each forward reads it."""


def choose_fp8_weights(args: Namespace, command_line: Sequence[str]) -> str | None:
    """Set ``args.swap_fp8_weights`` if no flag does and the run plans itself: to what is predicted to be faster.

    Nothing is set, so that copies are kept, where TransformerEngine always keeps them, where the planner has no figures
    for the GPU or no formulas for the model, and with pipeline stages.

    Args:
        args: Megatron's parsed arguments.
        command_line: the words they were parsed from.

    Returns:
        A line that says so, if copies are not kept.
    """
    budget_gib = args.swap_memory_gib
    if args.swap_memory_fraction is not None:
        budget_gib = args.swap_memory_fraction * device_memory_gib(args)
    if args.swap_fp8_weights is not None or budget_gib is None or why_copies_stay(args):
        return None
    gpu = gpu_of(torch.cuda.get_device_name(args.local_rank)) if torch.cuda.is_available() else None
    given = {word.removeprefix("--").partition("=")[0] for word in command_line}
    if gpu is None or given & UNSUPPORTED or not _can_drop(args.gradient_accumulation_fusion):
        return None
    try:
        training = read_flags(command_line, args.world_size)
        if not training.may_drop_copies:
            return None
        if not training.offloads:
            training = replace(training, state_stays="no flag offloads it")  # spares its options
        found = {one.name: one for one in of_training(training, gpu, budget_gib, args.swap_host_gib)}
    except UsageError:
        return None
    with_state = DISK if args.swap_disk_dir is not None else STATE
    chosen = found.get(with_state if training.offloads else PLANNED)
    if chosen is None or DROPPED not in chosen.flags:
        args.swap_fp8_weights = KEPT
        return None
    args.swap_fp8_weights = DROPPED
    return "the planner chose --swap-fp8-weights recompute: in this budget keep is slower, or does not fit"


def _can_drop(fuses_gradients: bool) -> bool:
    """Return whether the installed TransformerEngine can make copies again, with fused gradients if those are on."""
    return _has_flag() and not (fuses_gradients and registry.find_misfits([te_restored_weight.PATCH]))


def _kinds() -> tuple[Any, ...]:
    """Return the classes of linear layers that make copies; none where TransformerEngine is not imported."""
    package: Any = sys.modules.get(PACKAGE)
    return () if package is None else (package.Linear, package.LayerNormLinear)


def _has_flag() -> bool:
    return all(hasattr(kind, FLAG.removeprefix("_")) for kind in _kinds())


def recompute_weights(chunk: nn.Module) -> Callable[[], None]:
    """Let the linear layers of ``chunk`` make the 8-bit layouts of their weights where they read them.

    Returns:
        A function that lets them keep copies again.

    Raises:
        UsageError: the installed TransformerEngine always keeps them.
    """
    if not _has_flag():
        raise UsageError("--swap-fp8-weights recompute needs transformer_engine>=2.17. Update it, or choose keep.")
    layers = [module for module in chunk.modules() if isinstance(module, _kinds())]  # no experts (GroupedLinear)
    before = [(layer, vars(layer).get(FLAG)) for layer in layers]
    for layer in layers:
        setattr(layer, FLAG, True)
        layer._fp8_workspaces.clear()

    def keep() -> None:
        for layer, was in before:
            if was is None:
                delattr(layer, FLAG)
            else:
                setattr(layer, FLAG, was)

    return keep
