"""The ``--swap-`` flags, and the settings they give."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from megatron.swap.common.config import (
    LAYER_SYNTAX,
    LOG_LEVELS,
    MOST_CANDIDATES,
    POLICIES,
    USUAL_FRACTION,
    SwapConfig,
    parse_layers,
    parse_steps,
)
from megatron.swap.common.plan import LAYER_SECTION, Plan, check_model, load_plan
from megatron.swap.common.types import GIB, PRODUCERS, UsageError
from megatron.swap.megatron_lm.compatibility import can_recompute, check_one_way, check_settings, memory_flags
from megatron.swap.memory.host_memory import safe_host_bytes
from megatron.swap.planner.flags import model_of, parse_fraction


class _Deterministic(argparse.Action):
    """Sets our flag and Megatron's, so that Megatron checks and sets the environment before CUDA starts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.swap_deterministic = True
        namespace.deterministic_mode = True


def add_swap_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group of ``--swap-`` flags: Megatron's ``extra_args_provider``.

    Args:
        parser: Megatron's, or any other.

    Returns:
        The same parser, as Megatron wants it.
    """
    group = parser.add_argument_group(
        title="swap", description="Saved activations are offloaded between forward and backward (Megatron Swap)."
    )
    add = group.add_argument
    add("--swap-layers", default="none", metavar="LAYERS",
        help=f"Layers whose activations are swapped, 0-based over the whole model: {LAYER_SYNTAX}. Default: none.")
    add("--swap-modules", nargs="+", default=[], metavar="MODULE",
        help="Swap only what these submodules of a layer save, e.g. 'mlp', 'mlp.linear_fc1', 'core_attention'; "
        "'layer' is the layer itself, 'checkpoint' the input of a recomputed segment. Default: everything.")
    add("--swap-recompute", nargs="+", default=[], metavar="KIND",
        help=f"Recompute the outputs of these kinds of kernels in backward, equal to the bit, instead of keeping or "
        f"swapping them. In all layers, whatever --swap-layers says. Kinds: {', '.join(PRODUCERS)}; all but linear are "
        "cheap. Default: none.")
    add("--swap-plan", default=None, metavar="FILE",
        help="Carry out this plan (docs/planner.md): keep, swap or recompute, site by site. It takes the place of "
        "--swap-layers, --swap-modules and --swap-recompute.")
    add("--swap-policy", choices=POLICIES, default=None,
        help="auto: measure a few steps, find the fastest plan that stays below the memory that the flags below "
        f"allow, train by it. Default: auto with one of them, else manual. auto alone: {USUAL_FRACTION:g} of the "
        "device's memory.")
    add("--swap-memory-gib", type=float, default=None, metavar="GIB",
        help="Most device memory that a step may take; the planner decides what to keep, swap and recompute.")
    add("--swap-memory-fraction", type=float, default=None, metavar="FRACTION",
        help="The same as a fraction of the device's memory, above 0 and at most 1.")
    add("--swap-max-candidates", type=int, default=3, metavar="N",
        help=f"Most plans that the planner tries live, 1 to {MOST_CANDIDATES}. Default: 3.")
    add("--swap-save-plan", default=None, metavar="FILE",
        help="Write what was done with each saved tensor as a plan file.")
    add("--swap-save-profile", default=None, metavar="FILE",
        help="Write the profile that --swap-policy auto has measured, for tools/plan.py.")
    add("--swap-optimizer", default="0", metavar="FRACTION",
        help="Fraction of the optimizer's state, 0 to 1, that is offloaded to host memory. It passes through the GPU "
        "in buckets while the optimizer steps. auto: the planner decides how much. Default: 0.")
    add("--swap-disk-dir", default=None, metavar="DIR",
        help="Folder on a local disk for optimizer state and activations that host memory has no room for. Nothing is "
        "left there when training ends, however it ends.")
    add("--swap-disk-gib", type=float, default=None, metavar="GIB",
        help="Most that one rank may take there. Default: what is free, less 1 GiB, shared by the ranks of a host.")
    add("--swap-oom-guard", action="store_true",
        help="When an allocation on the GPU fails, evict saved tensors to host memory and retry it; the step becomes "
        "slower. --swap-policy auto does so while it measures the first steps, this flag always.")
    add("--swap-min-mib", type=float, default=1.0, metavar="MIB",
        help="Storages smaller than this stay on the device. Default: 1.")
    add("--swap-host-gib", type=float, default=None, metavar="GIB",
        help="Most host memory that one rank may reserve. Default: what is safe by the machine's and the cgroup's "
        "memory, shared by the ranks of a host.")
    add("--swap-host-unchecked", action="store_true",
        help="Take --swap-host-gib even if the machine reports less memory (machines whose memory grows on demand).")
    add("--swap-prefetch-gib", type=float, default=None, metavar="GIB",
        help="Most memory for storages that are prefetched before their layer's backward. Default: as much as the "
        "largest layer has swapped.")
    add("--swap-verify", action="store_true",
        help="Checksum every storage on its way out and back in, and stop at a difference. Slow.")
    add("--swap-deterministic", nargs=0, action=_Deterministic, default=False,
        help="Everything that bit-equal runs on a GPU need: Megatron's --deterministic-mode, and flash instead of "
        "cuDNN attention for the local spec.")
    add("--swap-summary", default=None, metavar="PATH",
        help="Write a JSON summary of bytes, waits, peaks and losses here when training ends.")
    add("--swap-profile", default=None, metavar="FOLDER",
        help="Trace --swap-profile-steps, with what the engine does in them, by torch.profiler into "
        "FOLDER/rank-N.json.gz; 'nsys': under Nsight Systems, open its capture range for these steps instead "
        "(tools/profile.sh does all of it).")
    add("--swap-profile-steps", default="4-5", metavar="STEPS",
        help="First and last step to trace, counted from the start of this run, from 3 on. Default: 4-5.")
    add("--swap-log-level", choices=LOG_LEVELS, default="info",
        help="quiet: no tables and no swap line an iteration; debug: Megatron's start-up output too. Default: info.")
    add("--swap-cpu-delay-ms", type=float, default=0.0, metavar="MS",
        help="Machines without a GPU: longest random delay of an emulated copy, to test the order of copies.")
    add("--swap-cpu-memory-gib", type=float, default=None, metavar="GIB",
        help="Machines without a GPU: memory of the emulated device, beside what the model takes when it is built, to "
        "test what happens when that is short. Default: no limit.")
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
    host = safe_host_bytes(1)
    machine_gib = min(host.total_bytes, host.cgroup_limit_bytes or host.total_bytes) / GIB
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
    check_model(plan, model_of(args), f"--swap-plan {args.swap_plan}")
    for layer in plan.layers():
        for section in plan.sections(layer):
            if section != LAYER_SECTION:
                raise UsageError(
                    f"--swap-plan {args.swap_plan}: layer {layer}: section {section!r} cannot be recomputed in training"
                    f"; allowed is {LAYER_SECTION!r}, the whole layer. Name single sites with action recompute instead."
                )
    return plan
