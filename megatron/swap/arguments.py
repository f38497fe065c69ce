"""The Megatron edge for the command line: the ``--swap-`` flags, and what of Megatron's own they exclude."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from megatron.swap.config import (
    LAYER_SYNTAX,
    LOG_LEVELS,
    MOST_CANDIDATES,
    POLICIES,
    USUAL_FRACTION,
    SwapConfig,
    parse_layers,
    parse_steps,
)
from megatron.swap.host_memory import safe_host_bytes
from megatron.swap.layer import known_modules
from megatron.swap.plan import LAYER_SECTION, Plan, check_model, load_plan
from megatron.swap.planner.flags import model_of, parse_part
from megatron.swap.profiler import NSYS
from megatron.swap.types import ACTIVATION, GIB, LINEAR, NORM, PRODUCERS, UsageError


class _Deterministic(argparse.Action):
    """Sets ours and Megatron's flag: Megatron then checks and sets the environment before CUDA starts."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.swap_deterministic = True
        namespace.deterministic_mode = True


def add_swap_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's ``extra_args_provider``: adds the group of ``--swap-`` flags."""
    group = parser.add_argument_group(
        title="swap", description="Activations leave the GPU between forward and backward (Megatron Swap)."
    )
    add = group.add_argument
    add("--swap-layers", default="none", metavar="LAYERS",
        help=f"Layers whose activations are swapped, 0-based over the whole model: {LAYER_SYNTAX}. Default: none.")
    add("--swap-modules", nargs="+", default=[], metavar="MODULE",
        help="Swap only what these submodules of a layer save, e.g. 'mlp', 'mlp.linear_fc1', 'core_attention'; "
        "'layer' is the layer itself, 'checkpoint' the input of a recomputed segment. Default: everything.")
    add("--swap-recompute", nargs="+", default=[], metavar="KIND",
        help=f"Do not hold the outputs of these kinds of kernels, in all layers, whatever --swap-layers says: make "
        f"them again in backward, equal to the bit. Kinds: {', '.join(PRODUCERS)}; all but linear are cheap. "
        "Default: none.")
    add("--swap-plan", default=None, metavar="FILE",
        help="Carry out this plan (docs/planner.md): keep, swap or recompute, site by site. It takes the place of "
        "--swap-layers, --swap-modules and --swap-recompute.")
    add("--swap-policy", choices=POLICIES, default=None,
        help="auto: measure a few steps, find the fastest plan that stays below the memory that the flags below "
        f"allow, train by it. Default: auto with one of them, else manual. auto alone: {USUAL_FRACTION:g} of the "
        "device's memory.")
    add("--swap-memory-gib", type=float, default=None, metavar="GIB",
        help="Most device memory that a step may take; the planner decides what to keep, swap and recompute.")
    add("--swap-memory-fraction", type=float, default=None, metavar="PART",
        help="The same as a part of the device's memory, above 0 and at most 1.")
    add("--swap-max-candidates", type=int, default=3, metavar="N",
        help=f"Most plans that the planner tries live, 1 to {MOST_CANDIDATES}. Default: 3.")
    add("--swap-save-plan", default=None, metavar="FILE",
        help="Write what was done with each saved tensor as a plan file.")
    add("--swap-save-profile", default=None, metavar="FILE",
        help="Write the profile that --swap-policy auto has measured, for tools/plan.py.")
    add("--swap-optimizer", default="0", metavar="PART",
        help="Part of the optimizer's state, 0 to 1, that rests in host memory and passes through the GPU in buckets "
        "while the optimizer steps. auto: as much as the plan wants. Default: 0.")
    add("--swap-disk-dir", default=None, metavar="DIR",
        help="Folder on a local disk for what host memory has no room for, optimizer state and activations. Nothing is "
        "left there when training ends, however it ends.")
    add("--swap-disk-gib", type=float, default=None, metavar="GIB",
        help="Most that one rank may take there. Default: what is free, less 1 GiB, shared by the ranks of a host.")
    add("--swap-oom-guard", action="store_true",
        help="When an allocation on the GPU fails, copy saved tensors to host memory and try again, instead of ending "
        "there: the step becomes slower. With --swap-policy auto that is so while the first steps are measured, with "
        "this flag always.")
    add("--swap-min-mib", type=float, default=1.0, metavar="MIB",
        help="Storages smaller than this stay on the device. Default: 1.")
    add("--swap-host-gib", type=float, default=None, metavar="GIB",
        help="Most host memory that one rank may book. Default: what is safe by the machine's and the cgroup's "
        "memory, shared by the ranks of a host.")
    add("--swap-host-unchecked", action="store_true",
        help="Take --swap-host-gib even if the machine reports less memory (machines whose memory grows on demand).")
    add("--swap-prefetch-gib", type=float, default=None, metavar="GIB",
        help="Most bytes that are brought back ahead of their layer's backward. Default: as much as the largest "
        "layer has swapped.")
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
    """The checked settings out of Megatron's parsed arguments.

    Raises:
        UsageError: a malformed or impossible value, a plan for another model, or a Megatron flag that does not go
            with swapping.
    """
    auto = _wants_auto(args)
    _check_one_way(args, auto)
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
        optimizer=_part_at_rest(args, auto, plan),
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
    _check_module_names(config.modules)
    _check_upstream(args)
    _check_profile(args, config)
    _check_unused(config)
    if auto:
        config.budget_gib(device_memory_gib(args))
    if config.acts:
        _check_combination(args, config)
        _check_recompute(args, config)
    if config.optimizer:
        _check_optimizer(args, config)
    return config


def device_memory_gib(args: argparse.Namespace) -> float:
    """Memory of this rank's device in GiB; without a GPU, of the machine, whose memory plays the device, or as much of
    that as a flag says."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(args.local_rank).total_memory / GIB
    host = safe_host_bytes(1)
    machine_gib = min(host.total_bytes, host.cgroup_limit_bytes or host.total_bytes) / GIB
    return min(machine_gib, args.swap_cpu_memory_gib or machine_gib)


def recompute_kinds(args: argparse.Namespace, config: SwapConfig) -> tuple[str, ...]:
    """The kinds of kernels that have to tell what they make: those asked for, or all that a plan may have meant."""
    if config.plan is not None:
        wanted = any(config.plan.recomputes_layer(layer) for layer in config.plan.layers())
    else:
        wanted = config.auto
    return tuple(kind for kind in PRODUCERS if wanted and _can_recompute(args, kind)) or config.recompute


def _can_recompute(args: argparse.Namespace, kind: str) -> bool:
    try:
        _check_recompute(args, SwapConfig(layers=frozenset(), recompute=(kind,)))
    except UsageError:
        return False
    return True


def _part_at_rest(args: argparse.Namespace, auto: bool, plan: Plan | None) -> float:
    """Of the optimizer's state: what the plan says, all that may where the planner decides."""
    part = parse_part(str(args.swap_optimizer))
    if part is not None:
        return part
    if auto:
        return 1.0
    if plan is None or plan.resting is None:
        raise UsageError(
            "--swap-optimizer auto: neither a planner nor a plan says how much is to rest. Give --swap-memory-gib, a "
            "--swap-plan that was made with --swap-optimizer auto, or a number."
        )
    return plan.resting


def _wants_auto(args: argparse.Namespace) -> bool:
    flags = _memory_flags(args)
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        both = " and ".join(f"{flag} {flags[flag]:g}" for flag in given)
        raise UsageError(f"{both} both say how much memory a step may take. Drop one.")
    if given and args.swap_policy == "manual":
        raise UsageError(f"{given[0]} lets the planner decide; --swap-policy manual says it may not. Drop one.")
    return bool(given) or args.swap_policy == "auto"


def _memory_flags(args: argparse.Namespace) -> dict[str, float | None]:
    return {"--swap-memory-gib": args.swap_memory_gib, "--swap-memory-fraction": args.swap_memory_fraction}


def _check_one_way(args: argparse.Namespace, auto: bool) -> None:
    """Either a plan file, or the planner, or the flags for layers, modules and kinds say what to do."""
    flags = {
        f"--swap-plan {args.swap_plan}": args.swap_plan is not None,
        _auto_flag(args): auto,
        f"--swap-layers {args.swap_layers}": args.swap_layers != "none",
        f"--swap-modules {' '.join(args.swap_modules)}": bool(args.swap_modules),
        f"--swap-recompute {' '.join(args.swap_recompute)}": bool(args.swap_recompute),
    }
    given = [flag for flag, is_given in flags.items() if is_given]
    if len(given) > 1 and (auto or args.swap_plan is not None):
        decides = "the plan" if args.swap_plan is not None else "the planner"
        raise UsageError(
            f"{given[0]} cannot be combined with {given[1]}: {decides} decides what happens to every saved tensor. "
            "Drop one of the two."
        )


def _auto_flag(args: argparse.Namespace) -> str:
    """The flag that asks for the planner, as it was given."""
    return next(
        (f"{flag} {value:g}" for flag, value in _memory_flags(args).items() if value is not None), "--swap-policy auto"
    )


def _plan(args: argparse.Namespace) -> Plan:
    """The plan file, which must be for this model and ask for nothing that training cannot do."""
    plan = load_plan(args.swap_plan)
    check_model(plan, model_of(args), f"--swap-plan {args.swap_plan}")
    for layer in plan.layers():
        for section in plan.sections(layer):
            if section != LAYER_SECTION:
                raise UsageError(
                    f"--swap-plan {args.swap_plan}: layer {layer}: section {section!r} cannot run again in training; "
                    f"allowed is {LAYER_SECTION!r}, the whole layer. Name single sites instead, with action recompute."
                )
    return plan


def _check_unused(config: SwapConfig) -> None:
    """Choices of what nobody asked for, files that nothing would be written to, what only the planner heeds, and what
    only the emulation does."""
    if config.modules and not config.layers:
        raise UsageError(
            f"--swap-modules {' '.join(config.modules)}: of no layer. Add --swap-layers, such as all, or drop "
            "--swap-modules."
        )
    if config.cpu_memory_gib is not None and torch.cuda.is_available():
        raise UsageError(
            f"--swap-cpu-memory-gib {config.cpu_memory_gib:g}: this machine has a GPU, whose memory is what there is. "
            "Drop the flag; --swap-memory-gib is the most that the planner may use."
        )
    if config.save_plan is not None and not config.acts:
        raise UsageError(
            f"--swap-save-plan {config.save_plan}: nothing is swapped or recomputed, so there is no plan to write. Add "
            "--swap-layers, --swap-recompute, --swap-plan or --swap-memory-gib, or drop --swap-save-plan."
        )
    if config.save_profile is not None and not config.auto:
        raise UsageError(
            f"--swap-save-profile {config.save_profile}: only the planner measures a profile. Add --swap-memory-gib, "
            "--swap-memory-fraction or --swap-policy auto, or drop --swap-save-profile."
        )
    if config.max_candidates != SwapConfig.max_candidates and not config.auto:
        raise UsageError(
            f"--swap-max-candidates {config.max_candidates}: only the planner tries plans. Add --swap-memory-gib, "
            "--swap-memory-fraction or --swap-policy auto, or drop --swap-max-candidates."
        )


def _check_module_names(patterns: Sequence[str]) -> None:
    known = known_modules()
    for pattern in patterns:
        unknown = [part for part in pattern.split(".") if part not in known]
        if unknown:
            raise UsageError(
                f"--swap-modules {pattern!r}: {unknown[0]!r} is not a submodule of a transformer layer. "
                f"Known are: {', '.join(known)}; join them with dots (mlp.linear_fc1)."
            )


def _check_upstream(args: argparse.Namespace) -> None:
    """What Megatron 0.19.2 itself cannot do with its local spec, and ends in something worse than a message."""
    recomputes_mlp = args.recompute_granularity == "selective" and "mlp" in (args.recompute_modules or [])
    if recomputes_mlp and args.transformer_impl == "local" and args.add_bias_linear:
        raise UsageError(
            "--recompute-modules mlp with --transformer-impl local and biases never ends in Megatron 0.19.2 (the MLP "
            "hands its bias through the checkpoint). Add --disable-bias-linear, drop mlp, or use TransformerEngine."
        )


def _check_profile(args: argparse.Namespace, config: SwapConfig) -> None:
    if config.profile is None:
        return
    if args.profile:
        raise UsageError("--swap-profile cannot be combined with Megatron's --profile: one profiler a run. Drop one.")
    if config.profile == NSYS and not torch.cuda.is_available():
        raise UsageError(
            "--swap-profile nsys: there is no GPU here for Nsight Systems to trace. Give a folder: torch.profiler "
            "traces the emulation into it."
        )
    last = config.profile_steps[1]
    if args.train_iters is not None and last > args.train_iters:
        raise UsageError(
            f"--swap-profile-steps {args.swap_profile_steps}: training ends with step {args.train_iters}. Trace "
            "earlier steps, or raise --train-iters."
        )


def _check_recompute(args: argparse.Namespace, config: SwapConfig) -> None:
    """What Megatron recomputes itself, so that our recomputing would do nothing."""
    ours = f"--swap-recompute {' '.join(config.recompute)}"
    if not config.recompute:
        return
    if args.recompute_granularity == "full" and args.recompute_method == "uniform":
        raise UsageError(
            f"{ours} cannot be combined with --recompute-granularity full --recompute-method uniform: all layers are "
            "recomputed whole. Drop --swap-recompute, or leave layers whole by --recompute-method block."
        )
    modules = (args.recompute_modules or []) if args.recompute_granularity == "selective" else []
    for kind, theirs in ((NORM, ("layernorm",)), (ACTIVATION, ("mlp", "moe", "moe_act")), (LINEAR, ("mlp",))):
        for module in theirs if kind in config.recompute else ():
            if module in modules:
                raise UsageError(
                    f"{ours} cannot be combined with --recompute-modules {module}: both would make the same tensors "
                    f"again. Drop {kind} from --swap-recompute, or {module} from --recompute-modules."
                )
    if LINEAR in config.recompute:
        _check_linear(args, ours, modules)
    one_function = args.bias_swiglu_fusion or args.use_te_activation_func if args.swiglu else True
    if ACTIVATION in config.recompute and not one_function:
        raise UsageError(
            f"{ours} cannot be combined with --no-bias-swiglu-fusion: what an unfused SwiGLU makes is no single "
            f"function's output. Drop --no-bias-swiglu-fusion, or {ACTIVATION} from --swap-recompute."
        )


def _check_linear(args: argparse.Namespace, ours: str, modules: Sequence[str]) -> None:
    """What a linear layer that runs once more, in backward, would disturb or wait for."""
    excluded = {
        f"--fp8-format {args.fp8}": (args.fp8, "running twice would move the scaling factors on"),
        f"--fp4-format {args.fp4}": (args.fp4, "running twice would move the scaling factors on"),
        "--sequence-parallel": (
            args.sequence_parallel and args.tensor_model_parallel_size > 1,
            "a linear layer gathers its input from all ranks, which would have to do so at the same moment again",
        ),
        "--recompute-modules layernorm": ("layernorm" in modules, "Megatron frees the norm's output that it reads"),
    }
    for flag, (given, why) in excluded.items():
        if given:
            raise UsageError(f"{ours} cannot be combined with {flag}: {why}. Drop {LINEAR} from --swap-recompute, or "
                             f"{flag}.")  # fmt: skip


def _check_optimizer(args: argparse.Namespace, config: SwapConfig) -> None:
    """What looks at the optimizer's state while it rests, or keeps it in a way of its own."""
    same = "both would take the same state"
    reads = "it reads the main parameters between steps, when they rest"
    quantized = "it makes the model's weights of all main parameters at once"
    scaled = "such state may have one scale for a whole parameter, which is stepped in slices"
    sharded = "it keeps state in buffers of its own"
    excluded = [
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", same),
        (args.optimizer_cuda_graph, "--optimizer-cuda-graph", "a captured step cannot be taken apart"),
        (args.cuda_graph_impl != "none", f"--cuda-graph-impl {args.cuda_graph_impl}", "captured layers tell nothing"),
        (args.log_params_norm, "--log-params-norm", reads),
        (args.async_save, "--async-save", "its writer, another process, does not see that memory"),
        (args.qk_clip, "--qk-clip", "it writes to main parameters between steps, when they rest"),
        (args.rl_offload_optimizer_during_inference, "--rl-offload-optimizer-during-inference", same),
        (args.fp8_param_gather, "--fp8-param-gather", quantized),
        (args.fp4_param_gather, "--fp4-param-gather", quantized),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", sharded),
        (args.use_torch_fsdp2, "--use-torch-fsdp2", sharded),
        (args.exp_avg_dtype != torch.float32, "--exp-avg-dtype below fp32", scaled),
        (args.exp_avg_sq_dtype != torch.float32, "--exp-avg-sq-dtype below fp32", scaled),
        (args.main_params_dtype != torch.float32, "--main-params-dtype below fp32", scaled),
    ]
    for given, flag, why in excluded:
        if given:
            raise UsageError(
                f"--swap-optimizer {config.optimizer:g} cannot be combined with {flag}: {why}. Drop {flag}, or "
                "--swap-optimizer."
            )


def _asked(args: argparse.Namespace, config: SwapConfig) -> tuple[str, str]:
    """The flag that makes us act, as it was given, and how to do without."""
    if config.plan is not None:
        return f"--swap-plan {args.swap_plan}", "drop --swap-plan"
    if config.auto:
        flag = _auto_flag(args)
        return flag, f"drop {flag.split()[0]}"
    if config.layers:
        return f"--swap-layers {args.swap_layers}", "say --swap-layers none"
    return f"--swap-recompute {' '.join(config.recompute)}", "drop --swap-recompute"


def _check_combination(args: argparse.Namespace, config: SwapConfig) -> None:
    same = "both would take the same tensors"
    graph = "a captured layer replays without telling anybody what it saves"
    shards = "such weights are known by their Python attributes, which backward does not see behind saved-tensor hooks"
    fsdp = "its weights come and go, and would pass for activations"
    excluded = [
        (args.cpu_offloading_num_layers > 0, f"--cpu-offloading-num-layers {args.cpu_offloading_num_layers}", same),
        (args.fine_grained_activation_offloading, "--fine-grained-activation-offloading", same),
        (args.cuda_graph_impl != "none", f"--cuda-graph-impl {args.cuda_graph_impl}", graph),
        (args.gtp_weight_remat_size > 1, "--tensor-parallel-num-weight-shards", shards),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", fsdp),
        (args.use_torch_fsdp2, "--use-torch-fsdp2", fsdp),
        (args.expert_gtp_weight_remat_size > 1, "--expert-tensor-parallel-num-weight-shards", shards),
    ]
    ours, without = _asked(args, config)
    for given, flag, why in excluded:
        if given:
            raise UsageError(
                f"{ours} cannot be combined with {flag}: {why}. Drop {flag}, or {without}."
            )
    if args.recompute_granularity != "full":
        return
    if config.plan is not None or config.auto:
        raise UsageError(
            f"{ours} cannot be combined with --recompute-granularity full: a plan says itself which layers run again. "
            f"Drop --recompute-granularity, or {without}."
        )
    if config.save_plan is not None:
        raise UsageError(
            f"--swap-save-plan {config.save_plan} cannot be combined with --recompute-granularity full: a plan file "
            "has no words for the segments that Megatron recomputes. Drop one of the two."
        )
