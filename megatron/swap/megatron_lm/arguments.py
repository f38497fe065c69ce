"""The ``--swap-`` flags, and the settings they give."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from megatron.swap.common.config import (
    LAYER_SYNTAX,
    LOG_LEVELS,
    MOST_CANDIDATES,
    MOST_DELAY_MS,
    POLICIES,
    USUAL_FRACTION,
    SwapConfig,
    parse_layers,
    parse_loss_chunks,
    parse_steps,
)
from megatron.swap.common.plan import DROPPED, FP8_WEIGHTS, LAYER_SECTION, Plan, check_model, load_plan
from megatron.swap.common.types import GIB, PRODUCERS, UsageError
from megatron.swap.forecast.flags import model_of, parse_fraction
from megatron.swap.megatron_lm.compatibility import can_recompute, check_one_way, check_settings, memory_flags
from megatron.swap.memory.host_memory import machine_memory_gib


class _Deterministic(argparse.Action):
    """Sets our flag and Megatron's, so that Megatron checks and sets the environment before CUDA starts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.swap_deterministic = True
        namespace.deterministic_mode = True


def add_swap_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the ``--swap-`` flags.

    A help text is 'What the flag does. Default: value. Set it when …': docs/reference/flags.md is made from it.

    Args:
        parser: Megatron's, or any other.

    Returns:
        The same parser.
    """
    add = parser.add_argument_group(
        "swap: activations", "Saved activations: which are offloaded or recomputed."
    ).add_argument
    add("--swap-layers", default="none", metavar="LAYERS",
        help=f"Layers whose saved activations are offloaded in forward and reloaded in backward: {LAYER_SYNTAX}. "
        "Default: none. Set it when you choose layers yourself; --swap-memory-gib chooses for you.")
    add("--swap-modules", nargs="+", default=[], metavar="MODULE",
        help="Swap only what these submodules of the chosen layers save, such as mlp, mlp.linear_fc1 or "
        "core_attention. A name matches a submodule and everything in it; 'layer' is the layer itself, 'checkpoint' "
        "the input of a recomputed segment. Default: every submodule. Set it when forward is too short to hide the "
        "copies of whole layers.")
    add("--swap-recompute", nargs="+", default=[], metavar="KIND",
        help="Recompute the outputs of these kinds of kernels in backward, equal to the bit, in all layers, swapped "
        f"or not. Kinds: {', '.join(PRODUCERS)}. All but the last two, which run linear layers again, are cheap. "
        "Default: no kind. Set it when memory is short and the link is busy.")
    add("--swap-min-mib", type=float, default=1.0, metavar="MIB",
        help="Keep storages that are smaller. Default: %(default)g. Set it when the model is tiny, so that its "
        "storages are all smaller.")
    add("--swap-prefetch-gib", type=float, default=None, metavar="GIB",
        help="Most memory for reloads ahead of their layer's backward. Memory that backward frees comes on top, up "
        "to the same amount. Default: the plan's value, or what the largest layer swaps. Set it when the "
        "summary shows a high wait_ms and memory is left (raise it), or memory is short (lower it).")
    add("--swap-oom-guard", action="store_true",
        help="When an allocation on the GPU fails, evict saved tensors to host memory and retry the allocation. A "
        "step with evictions is slower. The planner guards its first steps without this flag. Default: off. Set it "
        "when a few steps need more memory than the GPU has.")
    add("--swap-loss-chunks", default=None, metavar="N",
        help="Run the output layer and the loss in N chunks of the sequence, so that the logits of one chunk exist at "
        "a time. Backward computes the logits again. Sums over several chunks differ in their last bits from the "
        "whole's. auto: as few chunks as keep the loss below a layer's own peak. With "
        "--no-gradient-accumulation-fusion chunks hold a sum in fp32 (width x vocabulary). Default: the whole at "
        "once. Set it when the logits set the peak: long sequences, large vocabularies.")

    add("--swap-fp8-weights", choices=FP8_WEIGHTS, default=None,
        help="Whether TransformerEngine keeps its 8-bit copies of weights (2 bytes a weight on Hopper), or makes "
        "them in each forward and again in backward, equal to the bit. Experts keep theirs. Default: keep; "
        "with a budget, the planner chooses. Set it when memory is short.")

    add = parser.add_argument_group(
        "swap: planner", "Measure the model, then keep, swap or recompute each saved tensor within a memory budget."
    ).add_argument
    add("--swap-memory-gib", type=float, default=None, metavar="GIB",
        help="Most device memory that a step may take. The planner decides what to keep, swap and recompute. "
        "Default: no budget. Set it when the model does not fit; a few GiB below the GPU's memory is a good value.")
    add("--swap-memory-fraction", type=float, default=None, metavar="FRACTION",
        help="The same budget as a fraction of the device's memory, above 0 and at most 1. Default: no budget. Set "
        "it when one command runs on different GPUs.")
    add("--swap-policy", choices=POLICIES, default=None,
        help="auto: measure a few steps, find the fastest plan within the budget, train by that plan. manual: do "
        "what the other flags say. Default: auto with a budget, else manual. Set it when you want the planner "
        f"without a budget: auto alone takes {USUAL_FRACTION:g} of the device's memory.")
    add("--swap-max-candidates", type=int, default=3, metavar="N",
        help=f"Most plans that the planner tries in training steps, 1 to {MOST_CANDIDATES}; above 1, then up to "
        "three that use memory left free. Default: %(default)s. Set it when steps are long (lower it).")
    add("--swap-plan", default=None, metavar="FILE",
        help="Carry out this plan file, site by site. The plan replaces --swap-layers, --swap-modules and "
        "--swap-recompute. Default: no plan. Set it when you have a plan of tools/plan.py or of an earlier run.")
    add("--swap-save-plan", default=None, metavar="FILE",
        help="Write a plan file: what was done with each saved tensor, or the planner's plan. Default: not written. "
        "Set it when you want to edit the plan, or to skip the measurement in the next run.")
    add("--swap-save-profile", default=None, metavar="FILE",
        help="Write the profile that the planner measured, for tools/plan.py. Default: not written. Set it when you "
        "want to plan other budgets without a GPU.")

    add = parser.add_argument_group(
        "swap: optimizer state", "Main parameters and moments: in host memory or on disk between optimizer steps."
    ).add_argument
    add("--swap-optimizer", default="0", metavar="FRACTION",
        help="Fraction of the optimizer's state, 0 to 1, that is offloaded to host memory. The state passes through "
        "the GPU in buckets while the optimizer steps. auto: the planner or the plan decides how much. Default: "
        "%(default)s. Set it when weights and optimizer state fill the GPU.")

    add = parser.add_argument_group("swap: host memory and disk", "Where offloaded bytes are kept.").add_argument
    add("--swap-host-gib", type=float, default=None, metavar="GIB",
        help="Most pinned host memory that one rank may reserve. Default: what the machine and its cgroup can spare, "
        "divided by the ranks of the host. Set it when other programs need the host's memory.")
    add("--swap-host-unchecked", action="store_true",
        help="Accept --swap-host-gib even if the machine reports less memory. Default: off. Set it when the "
        "machine's memory grows on demand.")
    add("--swap-disk-dir", default=None, metavar="DIR",
        help="Folder on a local disk for optimizer state and activations that host memory has no room for. Nothing "
        "is left in the folder when training ends, however training ends. Default: no disk. Set it when host memory "
        "is full too.")
    add("--swap-disk-gib", type=float, default=None, metavar="GIB",
        help="Most disk space that one rank may take. Default: what is free, less 1 GiB, divided by the ranks of the "
        "host. Set it when others need the disk.")

    add = parser.add_argument_group("swap: output and checks", "What a run reports and verifies.").add_argument
    add("--swap-summary", default=None, metavar="PATH",
        help="Write a JSON summary of bytes, waits, peaks and losses when training ends. Default: not written. Set "
        "it when you want figures.")
    add("--swap-log-level", choices=LOG_LEVELS, default="info",
        help="quiet: no tables and no swap line an iteration. debug: whole tracebacks. Default: "
        "%(default)s. Set it when logs are long, or you report a problem.")
    add("--swap-profile", default=None, metavar="FOLDER",
        help="Trace --swap-profile-steps, with what the engine does in them, by torch.profiler into "
        "FOLDER/rank-N.json.gz. nsys: open the capture range of Nsight Systems for these steps instead. Default: no "
        "trace. Set it when you look for lost time; tools/profile.sh does all steps for you.")
    add("--swap-profile-steps", default="4-5", metavar="STEPS",
        help="First and last step to trace, counted from the start of this run, from 3 on. Default: %(default)s. Set "
        "it when a later step is of interest.")
    add("--swap-verify", action="store_true",
        help="Compare a checksum of every storage before its offload and after its reload, and stop at a difference. "
        "Slow. Default: off. Set it when you suspect wrong results.")
    add("--swap-deterministic", nargs=0, action=_Deterministic, default=False,
        help="Make runs on a GPU equal to the bit: set Megatron's --deterministic-mode, and use flash instead of "
        "cuDNN attention for the local spec. Slower. Default: off. Set it when you compare runs to the bit.")

    add = parser.add_argument_group(
        "swap: without a GPU", "Tests on a machine without a GPU, where host memory emulates the device."
    ).add_argument
    add("--swap-cpu-delay-ms", type=float, default=0.0, metavar="MS",
        help=f"Longest random delay of an emulated copy, at most {MOST_DELAY_MS}. Default: %(default)g. Set it when "
        "you test the order of copies.")
    add("--swap-cpu-memory-gib", type=float, default=None, metavar="GIB",
        help="Memory of the emulated device, beside what the model takes when it is built. Default: no limit. Set it "
        "when you test what happens when device memory is short.")
    return parser


def swap_config(args: argparse.Namespace) -> SwapConfig:
    """Return the checked settings of Megatron's parsed arguments.

    Raises:
        UsageError: a malformed or impossible value, a plan for another model, or a Megatron flag that is
            incompatible with swapping.
    """
    auto = _wants_auto(args)
    check_one_way(args, auto)
    plan = None if args.swap_plan is None else _plan(args)
    config = SwapConfig(
        layers=parse_layers(args.swap_layers, args.num_layers),
        modules=tuple(args.swap_modules),
        recompute=tuple(dict.fromkeys(args.swap_recompute)),
        plan=plan,
        plan_file=args.swap_plan,
        auto=auto,
        memory_gib=args.swap_memory_gib,
        memory_fraction=args.swap_memory_fraction,
        max_candidates=args.swap_max_candidates,
        save_plan=args.swap_save_plan,
        save_profile=args.swap_save_profile,
        optimizer=_offload_fraction(args, auto, plan),
        optimizer_auto=args.swap_optimizer == "auto" and auto,
        disk_dir=args.swap_disk_dir,
        disk_gib=args.swap_disk_gib,
        min_mib=args.swap_min_mib,
        host_gib=args.swap_host_gib,
        host_unchecked=args.swap_host_unchecked,
        prefetch_gib=args.swap_prefetch_gib,
        verify=args.swap_verify,
        summary=args.swap_summary,
        profile=args.swap_profile,
        profile_steps=parse_steps(args.swap_profile_steps),
        deterministic=args.swap_deterministic,
        log_level=args.swap_log_level,
        cpu_delay_ms=args.swap_cpu_delay_ms,
        cpu_memory_gib=args.swap_cpu_memory_gib,
        oom_guard=args.swap_oom_guard,
        loss_chunks=None if args.swap_loss_chunks is None else parse_loss_chunks(str(args.swap_loss_chunks)),
        recomputes_fp8_weights=args.swap_fp8_weights == DROPPED,
    )
    if auto:
        config.budget_gib(device_memory_gib(args))
    check_settings(args, config)
    return config


def device_memory_gib(args: argparse.Namespace) -> float:
    """Return the memory of this rank's device in GiB.

    Without a GPU, host memory emulates the device: return its size, or ``--swap-cpu-memory-gib`` if that is less.
    """
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(args.local_rank).total_memory / GIB
    machine_gib = machine_memory_gib()
    return min(machine_gib, args.swap_cpu_memory_gib or machine_gib)


def recompute_kinds(args: argparse.Namespace, config: SwapConfig) -> tuple[str, ...]:
    """Return the kinds of kernels whose outputs are recorded: those given, or all that a plan may refer to."""
    if config.plan is not None:
        wanted = any(config.plan.recomputes_layer(layer) for layer in config.plan.layers())
    else:
        wanted = config.auto
    return tuple(kind for kind in PRODUCERS if wanted and can_recompute(args, kind)) or config.recompute


def _offload_fraction(args: argparse.Namespace, auto: bool, plan: Plan | None) -> float:
    """Return the fraction of the optimizer's state to offload: the flag's, the plan's, or 1 if the planner decides."""
    fraction = parse_fraction(str(args.swap_optimizer))
    if fraction is not None:
        return fraction
    if auto:
        return 1.0
    if plan is None or plan.offload_fraction is None:
        raise UsageError(
            "--swap-optimizer auto: neither a planner nor a plan says how much to offload. Give --swap-memory-gib, a "
            "--swap-plan that was made with --swap-optimizer auto, or a number."
        )
    return plan.offload_fraction


def _wants_auto(args: argparse.Namespace) -> bool:
    flags = memory_flags(args)
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        both = " and ".join(f"{flag} {flags[flag]:g}" for flag in given)
        raise UsageError(f"{both} both say how much memory a step may take. Drop one.")
    if given and args.swap_policy == "manual":
        raise UsageError(f"{given[0]} lets the planner decide; --swap-policy manual says it may not. Drop one.")
    return bool(given) or args.swap_policy == "auto"


def _plan(args: argparse.Namespace) -> Plan:
    """Return the plan of the plan file, if it is for this model and training can carry it out."""
    plan = load_plan(args.swap_plan)
    if args.swap_fp8_weights is None:
        args.swap_fp8_weights = plan.model.swap_fp8_weights
    check_model(plan, model_of(args), f"--swap-plan {args.swap_plan}")
    for layer in plan.layers():
        for section in plan.sections(layer):
            if section != LAYER_SECTION:
                raise UsageError(
                    f"--swap-plan {args.swap_plan}: layer {layer}: section {section!r} cannot be recomputed in training"
                    f"; allowed is {LAYER_SECTION!r}, the whole layer. Name single sites with action recompute instead."
                )
    return plan
