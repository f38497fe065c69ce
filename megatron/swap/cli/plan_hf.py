"""The options of a Hugging Face model that no GPU has run, from its config file: no weights, no download, no GPU."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.swap.cli.plan_text import floor
from megatron.swap.common.plan import Plan
from megatron.swap.common.printable import in_one_line
from megatron.swap.common.settings import USUAL_FRACTION
from megatron.swap.common.types import UsageError
from megatron.swap.dry.config_model import (
    CHECKPOINT_CALL,
    Training,
    alone,
    checkpointed,
    model_of,
    step_of,
    swapped_part,
)
from megatron.swap.dry.engine import capacity_gib
from megatron.swap.dry.steps import DryStep, dry_planned_step, dry_profile, dry_step
from megatron.swap.forecast.gpus import Gpu, find_gpu
from megatron.swap.forecast.options import CHECKPOINTING, NOTHING, Option, best, of_dry_run


@dataclass(frozen=True)
class HfPlan:
    found: Sequence[Option]  # the simplest first; the last one is planned
    chosen: Option | None  # the fastest that fits, or a simpler one that is nearly as fast, or None
    on: str  # the budget and the GPU, for people
    tokens: int  # those of a step
    planned_by: str  # the call that plans, without its budget
    call: str  # the call for ``chosen``; empty: none


def plan_model(options: argparse.Namespace) -> HfPlan:
    """Run steps of the model dry, with nothing and with checkpointing, and plan, or raise ``UsageError``."""
    training = Training(
        options.seq_length, 1 if options.micro_batch_size is None else options.micro_batch_size,
        options.weights or "bf16", options.optimizer or "adamw", options.loss_chunk_tokens,
    )  # fmt: skip
    per_host = options.gpus_per_host or 1
    gpu = find_gpu(options.gpu).beside(per_host)
    if options.link_gb_s is not None:
        gpu = replace(gpu, link_gb_s=options.link_gb_s, link_both_gb_s=options.link_gb_s)
    budget_gib = USUAL_FRACTION * gpu.memory_gib if options.memory_gib is None else options.memory_gib
    if budget_gib > gpu.memory_gib:
        raise UsageError(f"--memory-gib {budget_gib:g}: {gpu.name} has {gpu.memory_gib:g} GiB.")
    host_gib = None if options.host_gib is None else options.host_gib / per_host
    with alone():
        return _plan(options, training, gpu, budget_gib, host_gib)


def _plan(
    options: argparse.Namespace, training: Training, gpu: Gpu, budget_gib: float, host_gib: float | None
) -> HfPlan:
    model = model_of(options.hf, training)
    part, script_name = swapped_part(model, training)
    steps: list[tuple[str, tuple[str, ...], DryStep]] = []  # name, calls of a script, figures
    try:
        gpu = gpu.for_width(model.config.get_text_config().hidden_size)
        steps.append((NOTHING, (), dry_step(model, step_of(model, training), gpu)))
        if model.supports_gradient_checkpointing:
            with checkpointed(model):
                steps.append((CHECKPOINTING, (CHECKPOINT_CALL,), dry_step(model, step_of(model, training), gpu)))
        cache = training.weights != "mixed"
        step = step_of(model, training)
        profile = dry_profile(model, step, gpu, part=part, host_gib=host_gib, autocast_cache=cache)
        non_layer, idle_ms = profile.non_layer, training.idle_ms(model)
        profile = replace(profile, non_layer=replace(non_layer, optimizer_ms=non_layer.optimizer_ms + idle_ms))

        def reserved_of(plan: Plan) -> float:
            def run(is_limited: bool) -> DryStep:
                anew = step_of(model, training)
                return dry_planned_step(model, anew, gpu, plan, part=part, autocast_cache=cache, is_limited=is_limited)

            found = run(is_limited=False)
            if found.reserved_gib > capacity_gib(gpu):
                within = run(is_limited=True)  # a full device gives back free memory
                return found.reserved_gib if within.is_full else within.reserved_gib
            return found.reserved_gib

        without_swapping = [(name, calls, one.ms + idle_ms, one.reserved_gib) for name, calls, one in steps]
        found = of_dry_run(profile, budget_gib, without_swapping, reserved_of)
    except UsageError:
        raise
    except Exception as error:  # a model that cannot run says so in any way
        raise UsageError(
            f"--hf {options.hf}: {type(model).__name__} cannot run dry ({in_one_line(error)}). Train it with "
            f"swap.activations({script_name}, memory_gib={floor(budget_gib)}), which measures its steps."
        ) from error
    more = "" if cache else ", autocast_cache=False"
    chosen, planned_by = best(found), f"swap.activations({script_name}, memory_gib=…{more})"
    call = "" if chosen is None or chosen.name == NOTHING else CHECKPOINT_CALL
    if chosen is not None and chosen.is_planned:
        call = planned_by.replace("…", floor(budget_gib))
    on = f"in {budget_gib:.4g} of the {gpu.memory_gib:g} GiB of {gpu.name}"
    return HfPlan(found, chosen, on, training.tokens, planned_by, call)
