"""Checks for incompatible flags, ours and Megatron's, before the model is built."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE

from megatron.swap.common.config import SwapConfig
from megatron.swap.common.layer_ranges import MOST_LAYERS
from megatron.swap.common.types import ACTIVATION, LINEAR, NORM, QUANTIZED, RESIDUAL, UsageError
from megatron.swap.forecast.fp8 import check_fp8_weights
from megatron.swap.megatron_lm.layer import known_modules
from megatron.swap.megatron_lm.versions import ADDED_LATER, is_gpt_config
from megatron.swap.profiling.profiler import NSYS


def check_flags(args: argparse.Namespace) -> None:
    """Refuse what would make Megatron ignore our flags, or run out of memory on its way to them.

    Args:
        args: what was parsed, before Megatron fills in what is not given. Another program's may lack Megatron's flags.

    Raises:
        UsageError: names the flag and what is allowed.
    """
    given = vars(args)
    if given.get("yaml_cfg") is not None:
        raise UsageError(
            f"--yaml-cfg {args.yaml_cfg}: Megatron then ignores all flags, so the --swap- flags too. Give the settings "
            "as flags, and drop --yaml-cfg."
        )
    if (given.get("num_layers") or 0) > MOST_LAYERS:  # a list of them may be too long to be made
        raise UsageError(f"--num-layers {args.num_layers}: must be at most {MOST_LAYERS}.")


def check_model_config(model_config: Any) -> None:
    """Refuse a model whose layers cannot be built here.

    Args:
        model_config: Megatron's, or of another kind, which is not checked.

    Raises:
        UsageError: the layers are TransformerEngine's, which is not here; or Megatron cannot build layers of MTP.
    """
    if not is_gpt_config(model_config):
        return
    config = model_config.transformer
    check_layer_spec(config.transformer_impl, model_config.transformer_layer_spec)
    if config.transformer_impl == "local" and config.multi_latent_attention and config.mtp_num_layers:
        raise UsageError(
            f"--mtp-num-layers {config.mtp_num_layers} cannot be combined with --multi-latent-attention and "
            "--transformer-impl local: Megatron builds the layers of MTP with a core attention of its own, which takes "
            "no multi-latent attention. Drop --mtp-num-layers, or use --transformer-impl transformer_engine."
        )


def check_layer_spec(transformer_impl: str, layer_spec: Any) -> None:
    """Refuse Megatron's choice of layers if these are TransformerEngine's, which is not here.

    Args:
        transformer_impl: Megatron's flag.
        layer_spec: of the model; ``None``: Megatron chooses.

    Raises:
        UsageError: these layers cannot be built.
    """
    if layer_spec is None and transformer_impl != "local" and not HAVE_TE:
        raise UsageError(
            f"--transformer-impl {transformer_impl}: TransformerEngine cannot be imported in this Python. Give "
            "--transformer-impl local, or install it (pip install 'transformer-engine[pytorch,core_cu13]')."
        )


def check_is_gpt(args: argparse.Namespace) -> None:
    """Refuse flags of a hybrid model where a GPT is made from the flags, which would ignore them.

    Raises:
        UsageError: names the flag.
    """
    pattern = _hybrid_pattern(argparse.Namespace(**ADDED_LATER | vars(args)))
    if pattern is not None:
        raise UsageError(
            f"{pattern}: the flag is for hybrid models, and the flags make a GPT here, which would ignore it. Drop it, "
            "or give swap.pretrain a model_provider."
        )


def check_forward_step(args: argparse.Namespace, forward_step: Callable[..., Any]) -> None:
    """Refuse Megatron's schedule of layers in parts where ``forward_step`` cannot follow it.

    Raises:
        UsageError: it makes no schedule plan.
    """
    takes = inspect.signature(forward_step).parameters
    if args.overlap_moe_expert_parallel_comm and "return_schedule_plan" not in takes:
        raise UsageError(
            "--overlap-moe-expert-parallel-comm: Megatron then asks for a schedule plan (return_schedule_plan=True), "
            "which the forward step of this program cannot return. Drop the flag."
        )


def _hybrid_pattern(args: argparse.Namespace) -> str | None:
    """Return the flag that asks for a hybrid model, as it was given; ``None``: it was not."""
    if args.hybrid_override_pattern is not None:  # Megatron makes --hybrid-layer-pattern of its older spellings
        return f"--hybrid-override-pattern {args.hybrid_override_pattern}"
    if args.hybrid_layer_pattern is None:
        return None
    layers, *of_mtp = args.hybrid_layer_pattern.split("/")
    if not layers:
        return f"--mtp-hybrid-override-pattern {of_mtp[0]}"
    return f"--hybrid-layer-pattern {args.hybrid_layer_pattern}"


def check_settings(args: argparse.Namespace, config: SwapConfig) -> None:
    """Refuse settings that are incompatible or have no effect.

    Raises:
        UsageError: names the given flag, the flag it is incompatible with, and which one to drop.
    """
    _check_module_names(config.modules)
    _check_upstream(args)
    _check_profile(args, config)
    _check_unused(config)
    if config.acts:
        _check_combination(args, config)
        _check_recompute(args, config)
    if config.optimizer:
        _check_optimizer(args, config)
    if config.loss_chunks is not None:
        _check_loss(args, config)
    if config.recomputes_fp8_weights:
        check_fp8_weights(args)


def can_recompute(args: argparse.Namespace, kind: str) -> bool:
    """Whether outputs of ``kind``, one of ``PRODUCERS``, may be recomputed in this run."""
    try:
        _check_recompute(args, SwapConfig(layers=frozenset(), recompute=(kind,)))
    except UsageError:
        return False
    return True


def memory_flags(args: argparse.Namespace) -> dict[str, float | None]:
    """Return the flags that give the planner a budget, with their values."""
    return {"--swap-memory-gib": args.swap_memory_gib, "--swap-memory-fraction": args.swap_memory_fraction}


def check_one_way(args: argparse.Namespace, auto: bool) -> None:
    """Refuse more than one of: a plan file, the planner, flags for layers, modules and kinds."""
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
    """Return the flag that asks for the planner, as it was given."""
    return next(
        (f"{flag} {value:g}" for flag, value in memory_flags(args).items() if value is not None), "--swap-policy auto"
    )


def _check_unused(config: SwapConfig) -> None:
    """Refuse flags that would have no effect."""
    if config.modules and not config.layers:
        raise UsageError(
            f"--swap-modules {' '.join(config.modules)} has no effect without --swap-layers. Add --swap-layers, such "
            "as all, or drop --swap-modules."
        )
    if config.cpu_memory_gib is not None and torch.cuda.is_available():
        raise UsageError(
            f"--swap-cpu-memory-gib {config.cpu_memory_gib:g}: the flag is for machines without a GPU. "
            "Drop the flag; --swap-memory-gib limits the planner."
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
    """Refuse flags that Megatron does not support with its local spec and does not refuse itself."""
    if not args.train_iters and not args.train_samples and not args.skip_train:
        raise UsageError("neither --train-iters nor --train-samples is given: add one, such as --train-iters 1000.")
    recomputes_mlp = args.recompute_granularity == "selective" and "mlp" in (args.recompute_modules or [])
    if recomputes_mlp and args.transformer_impl == "local" and args.add_bias_linear:
        raise UsageError(
            "--recompute-modules mlp with --transformer-impl local and biases never ends in Megatron (the MLP "
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
    """Refuse kinds that Megatron recomputes itself, so that recomputing them here would do nothing."""
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
                    f"{ours} cannot be combined with --recompute-modules {module}: both would recompute the same "
                    f"tensors. Drop {kind} from --swap-recompute, or {module} from --recompute-modules."
                )
    for kind in (LINEAR, RESIDUAL):
        if kind in config.recompute:
            _check_linear(args, ours, kind, modules)
    if QUANTIZED in config.recompute and not args.fp8:
        raise UsageError(
            f"{ours}: no tensor is quantized without --fp8-format. Add --fp8-format, or drop {QUANTIZED} from "
            "--swap-recompute."
        )
    one_function = args.bias_swiglu_fusion or args.use_te_activation_func if args.swiglu else True
    if ACTIVATION in config.recompute and not one_function:
        raise UsageError(
            f"{ours} cannot be combined with --no-bias-swiglu-fusion: the output of an unfused SwiGLU is not that of "
            f"a single function. Drop --no-bias-swiglu-fusion, or {ACTIVATION} from --swap-recompute."
        )


def _check_linear(args: argparse.Namespace, ours: str, kind: str, modules: Sequence[str]) -> None:
    """Refuse flags that are incompatible with running a linear layer again in backward."""
    tensor, of_sum = args.tensor_model_parallel_size, kind == RESIDUAL
    if of_sum and args.hidden_dropout > 0:
        raise UsageError(
            f"{ours} needs --hidden-dropout 0; {args.hidden_dropout:g} is set (Megatron's default is 0.1), and dropout "
            f"would drop other values when the sum is computed again. Give it, or drop {kind} from --swap-recompute."
        )
    excluded = {
        f"--fp8-recipe {args.fp8_recipe}": (
            args.fp8 and args.fp8_recipe in ("delayed", "custom"),
            "running twice would update the scaling factors twice",
        ),
        f"--fp4-format {args.fp4}": (args.fp4, "running twice would update the scaling factors twice"),
        "--sequence-parallel": (
            args.sequence_parallel and tensor > 1,
            "a linear layer gathers its input from all ranks, which would all have to recompute at the same moment",
        ),
        f"--tensor-model-parallel-size {tensor}": (
            of_sum and tensor > 1,
            "attention's output is a sum over all ranks, which would all have to recompute at the same moment",
        ),
        "--recompute-modules layernorm": (
            not of_sum and "layernorm" in modules, "Megatron frees the norm's output that it reads"
        ),
    }
    for flag, (given, why) in excluded.items():
        if given:
            raise UsageError(f"{ours} cannot be combined with {flag}: {why}. Drop {kind} from --swap-recompute, or "
                             f"{flag}.")  # fmt: skip


def _check_optimizer(args: argparse.Namespace, config: SwapConfig) -> None:
    """Refuse flags that read the optimizer's state while it is offloaded, or that store it differently."""
    same = "both would offload the same state"
    reads = "it reads the main parameters between steps, when they are offloaded"
    quantized = "it computes the model's weights from all main parameters at once"
    sharded = "it keeps state in its own buffers"
    types = (args.exp_avg_dtype, args.exp_avg_sq_dtype, args.main_params_dtype)
    has_scales = args.use_precision_aware_optimizer and any(one in (torch.float16, torch.uint8) for one in types)
    excluded = [
        (
            has_scales and args.main_params_dtype is torch.float32 and args.fp8_recipe not in (None, "delayed"),
            f"--fp8-recipe {args.fp8_recipe} and state in fp16 or 8 bits",
            "Megatron's checkpoints of it have no scales, with and without Megatron Swap",
        ),
        (
            config.disk_dir is not None and has_scales,
            "--swap-disk-dir with state in fp16 or 8 bits",
            "a scale belongs to a whole parameter, which does not pass through buffers between disk and device",
        ),
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", same),
        (args.optimizer_cuda_graph, "--optimizer-cuda-graph", "a captured step cannot run bucket by bucket"),
        (args.cuda_graph_impl != "none", f"--cuda-graph-impl {args.cuda_graph_impl}", "captured layers call no hooks"),
        (args.log_params_norm, "--log-params-norm", reads),
        (args.async_save, "--async-save", "its writer process cannot read offloaded state"),
        (args.qk_clip, "--qk-clip", "it writes to main parameters between steps, when they are offloaded"),
        (args.rl_offload_optimizer_during_inference, "--rl-offload-optimizer-during-inference", same),
        (
            args.fp8_param_gather and args.fp8_recipe == "mxfp8",
            "--fp8-param-gather with --fp8-recipe mxfp8",
            "it may stage main parameters in the gradients' memory",
        ),
        (
            args.fp8_param_gather and args.use_precision_aware_optimizer and args.fp8_recipe == "delayed",
            "--use-precision-aware-optimizer with --fp8-param-gather and --fp8-recipe delayed",
            "its step scales whole parameters, but parameters are stepped in slices",
        ),
        (args.fp4_param_gather, "--fp4-param-gather", quantized),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", sharded),
        (args.use_torch_fsdp2, "--use-torch-fsdp2", sharded),
    ]
    for given, flag, why in excluded:
        if given:
            raise UsageError(
                f"--swap-optimizer {config.optimizer:g} cannot be combined with {flag}: {why}. Drop {flag}, or "
                "--swap-optimizer."
            )


def _check_loss(args: argparse.Namespace, config: SwapConfig) -> None:
    """Refuse flags with which the output layer cannot run in chunks. ``checked_output`` refuses models."""
    fsdp = "its weights are gathered and freed, and each chunk needs the output layer's"
    excluded = [
        (args.cuda_graph_impl != "none", f"--cuda-graph-impl {args.cuda_graph_impl}", "a graph replays without chunks"),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", fsdp),
        (args.use_torch_fsdp2, "--use-torch-fsdp2", fsdp),
    ]
    for given, flag, why in excluded:
        if given:
            raise UsageError(
                f"--swap-loss-chunks {config.loss_chunks} cannot be combined with {flag}: {why}. Drop {flag}, or "
                "--swap-loss-chunks."
            )


def _asked(args: argparse.Namespace, config: SwapConfig) -> tuple[str, str]:
    """Return the flag that turns swapping on, as it was given, and how to turn it off."""
    if config.plan is not None:
        return f"--swap-plan {args.swap_plan}", "drop --swap-plan"
    if config.auto:
        flag = _auto_flag(args)
        return flag, f"drop {flag.split()[0]}"
    if config.layers:
        return f"--swap-layers {args.swap_layers}", "set --swap-layers none"
    if config.recompute:
        return f"--swap-recompute {' '.join(config.recompute)}", "drop --swap-recompute"
    return "--swap-oom-guard", "drop --swap-oom-guard"


def _check_combination(args: argparse.Namespace, config: SwapConfig) -> None:
    args = argparse.Namespace(**ADDED_LATER | vars(args))
    same = "both would offload the same tensors"
    graph = "a captured layer replays without saved-tensor hooks"
    shards = "such weights are identified by Python attributes, which saved-tensor hooks do not preserve"
    fsdp = "its weights are gathered and freed, and would be treated as activations"
    parts = "layers run in parts then, by a schedule plan and not by their forward"
    stash = "it stores what experts save by saved-tensor hooks of its own"
    pattern = _hybrid_pattern(args)
    excluded = [
        (args.overlap_moe_expert_parallel_comm, "--overlap-moe-expert-parallel-comm", parts),
        (args.moe_paged_stash, "--moe-paged-stash", stash),
        (pattern is not None, str(pattern), "a hybrid model's stack of layers is not swapped"),
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
            f"{ours} cannot be combined with --recompute-granularity full: a plan chooses the recomputed layers. "
            f"Drop --recompute-granularity, or {without}."
        )
    if config.save_plan is not None:
        raise UsageError(
            f"--swap-save-plan {config.save_plan} cannot be combined with --recompute-granularity full: a plan file "
            "cannot describe the segments that Megatron recomputes. Drop one of the two."
        )
