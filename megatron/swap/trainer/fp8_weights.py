"""Whether linear layers in 8 bits keep copies of their weights: the planner's choice unless a flag decides."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron.swap.common.plan import DROPPED, KEPT
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.forecast.flags import UNSUPPORTED, read_flags
from megatron.swap.forecast.fp8 import why_copies_stay
from megatron.swap.forecast.gpus import gpu_of
from megatron.swap.forecast.options import DISK, PLANNED, STATE, of_training
from megatron.swap.megatron_lm.checks import device_memory_gib
from megatron.swap.megatron_lm.fp8_weights import can_drop


def choose_fp8_weights(
    facts: MegatronFacts, settings: Settings, command_line: Sequence[str]
) -> tuple[Settings, str | None]:
    """Return ``settings`` with the faster ``fp8_weights`` if a planner may choose, and a line if copies go."""
    # Copies are kept if TransformerEngine always keeps them, without figures for the GPU or formulas for the model, and
    # with pipeline stages.
    budget_gib = settings.memory_gib
    if settings.memory_fraction is not None:
        budget_gib = settings.memory_fraction * device_memory_gib(facts, settings)
    if settings.fp8_weights is not None or budget_gib is None or why_copies_stay(facts):
        return settings, None
    gpu = gpu_of(torch.cuda.get_device_name(facts.local_rank)) if torch.cuda.is_available() else None
    given = {word.removeprefix("--").partition("=")[0] for word in command_line}
    if gpu is None or given & UNSUPPORTED or not can_drop(facts.gradient_accumulation_fusion):
        return settings, None
    try:
        training = read_flags(command_line, facts.world_size)
        if not training.may_drop_copies:
            return settings, None
        if not training.offloads:
            training = replace(training, state_stays="no flag offloads it")  # spares its options
        found = {one.name: one for one in of_training(training, gpu, budget_gib, settings.host_gib)}
    except UsageError:
        return settings, None
    with_state = DISK if settings.disk_dir is not None else STATE
    chosen = found.get(with_state if training.offloads else PLANNED)
    if chosen is None or DROPPED not in chosen.flags:
        return replace(settings, fp8_weights=KEPT), None
    line = "the planner chose --swap-fp8-weights recompute: in this budget keep is slower, or does not fit"
    return replace(settings, fp8_weights=DROPPED), line
