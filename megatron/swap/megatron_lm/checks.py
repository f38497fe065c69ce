"""Checks for incompatible settings, ours and Megatron's, before the model is built."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from megatron.swap.common.plan import LAYER_SECTION, Plan, check_model
from megatron.swap.common.settings import Settings, parse_layers
from megatron.swap.common.types import ACTIVATION, LINEAR, NORM, PRODUCERS, QUANTIZED, RESIDUAL, UsageError
from megatron.swap.forecast.facts import MegatronFacts, model_of
from megatron.swap.forecast.fp8 import check_fp8_weights
from megatron.swap.megatron_lm.layer import known_modules
from megatron.swap.memory.host_memory import memory_gib_of
from megatron.swap.profiling.profiler import NSYS


def hybrid_pattern(facts: MegatronFacts) -> str | None:
    """Return the flag that asks for a hybrid model, as it was given, or None."""
    if facts.hybrid_override_pattern is not None:  # Megatron makes --hybrid-layer-pattern of its older spellings
        return f"--hybrid-override-pattern {facts.hybrid_override_pattern}"
    if facts.hybrid_layer_pattern is None:
        return None
    layers, *of_mtp = facts.hybrid_layer_pattern.split("/")
    if not layers:
        return f"--mtp-hybrid-override-pattern {of_mtp[0]}"
    return f"--hybrid-layer-pattern {facts.hybrid_layer_pattern}"


def check_settings(facts: MegatronFacts, settings: Settings) -> None:
    """Raise a ``UsageError`` for settings that are incompatible with this run of Megatron."""
    parse_layers(settings.layers, facts.num_layers)
    if settings.plan is not None:
        _check_plan(facts, settings, settings.plan)
    if settings.auto:
        settings.budget_gib(device_memory_gib(facts, settings))
    _check_module_names(settings.modules)
    _check_upstream(facts)
    _check_profile(facts, settings)
    if settings.cpu_memory_gib is not None and torch.cuda.is_available():
        raise UsageError(
            f"--swap-cpu-memory-gib {settings.cpu_memory_gib:g}: the flag is for machines without a GPU. "
            "Drop the flag; --swap-memory-gib limits the planner."
        )
    if settings.acts:
        _check_combination(facts, settings)
        _check_recompute(facts, settings.recompute)
    if settings.offload_fraction:
        _check_optimizer(facts, settings)
    if settings.loss_chunks is not None:
        _check_loss(facts, settings)
    if settings.recomputes_fp8_weights:
        check_fp8_weights(facts)


def device_memory_gib(facts: MegatronFacts, settings: Settings) -> float:
    """Return the memory of this rank's device in GiB."""
    # Without a GPU, host memory emulates the device: its size, or `cpu_memory_gib` if that is less.
    device = torch.device("cuda", facts.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    return memory_gib_of(device, settings.cpu_memory_gib)


def recompute_kinds(facts: MegatronFacts, settings: Settings) -> tuple[str, ...]:
    """Return the kinds of kernels whose outputs are recorded: the given ones, or all that a plan may refer to."""
    plan = settings.plan
    wanted = settings.auto if plan is None else any(map(plan.recomputes_layer, plan.layers()))
    found = []
    for kind in PRODUCERS if wanted else ():
        with suppress(UsageError):
            _check_recompute(facts, (kind,))
            found.append(kind)
    return tuple(found) or settings.recompute


def _check_plan(facts: MegatronFacts, settings: Settings, plan: Plan) -> None:
    check_model(plan, model_of(facts, settings.chosen_fp8_weights), f"--swap-plan {plan.file}")
    for layer in plan.layers():
        for section in plan.sections(layer):
            if section != LAYER_SECTION:
                raise UsageError(
                    f"--swap-plan {plan.file}: layer {layer}: section {section!r} cannot be recomputed in training"
                    f"; allowed is {LAYER_SECTION!r}, the whole layer. Name single sites with action recompute instead."
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


def _check_upstream(facts: MegatronFacts) -> None:
    """Refuse flags that Megatron does not support with its local spec and does not refuse itself."""
    if not facts.train_iters and not facts.train_samples and not facts.skip_train:
        raise UsageError("neither --train-iters nor --train-samples is given: add one, such as --train-iters 1000.")
    recomputes_mlp = facts.recompute_granularity == "selective" and "mlp" in (facts.recompute_modules or [])
    if recomputes_mlp and facts.transformer_impl == "local" and facts.add_bias_linear:
        raise UsageError(
            "--recompute-modules mlp with --transformer-impl local and biases never ends in Megatron (the MLP "
            "hands its bias through the checkpoint). Add --disable-bias-linear, drop mlp, or use TransformerEngine."
        )


def _check_profile(facts: MegatronFacts, settings: Settings) -> None:
    if settings.profile is None:
        return
    if facts.profile:
        raise UsageError("--swap-profile cannot be combined with Megatron's --profile: one profiler a run. Drop one.")
    if settings.profile == NSYS and not torch.cuda.is_available():
        raise UsageError(
            "--swap-profile nsys: there is no GPU here for Nsight Systems to trace. Give a folder: torch.profiler "
            "traces the emulation into it."
        )
    last = settings.profile_steps[1]
    if facts.train_iters is not None and last > facts.train_iters:
        raise UsageError(
            f"--swap-profile-steps {'-'.join(map(str, settings.profile_steps))}: training ends with step "
            f"{facts.train_iters}. Trace earlier steps, or raise --train-iters."
        )


def _check_recompute(facts: MegatronFacts, kinds: Collection[str]) -> None:
    """Refuse kinds that Megatron recomputes itself, so that recomputing them here would do nothing."""
    ours = f"--swap-recompute {' '.join(kinds)}"
    if not kinds:
        return
    if facts.recompute_granularity == "full" and facts.recompute_method == "uniform":
        raise UsageError(
            f"{ours} cannot be combined with --recompute-granularity full --recompute-method uniform: all layers are "
            "recomputed whole. Drop --swap-recompute, or leave layers whole by --recompute-method block."
        )
    modules = (facts.recompute_modules or []) if facts.recompute_granularity == "selective" else []
    for kind, theirs in ((NORM, ("layernorm",)), (ACTIVATION, ("mlp", "moe", "moe_act")), (LINEAR, ("mlp",))):
        for module in theirs if kind in kinds else ():
            if module in modules:
                raise UsageError(
                    f"{ours} cannot be combined with --recompute-modules {module}: both would recompute the same "
                    f"tensors. Drop {kind} from --swap-recompute, or {module} from --recompute-modules."
                )
    for kind in (LINEAR, RESIDUAL):
        if kind in kinds:
            _check_linear(facts, ours, kind, modules)
    if QUANTIZED in kinds and not facts.fp8:
        raise UsageError(
            f"{ours}: no tensor is quantized without --fp8-format. Add --fp8-format, or drop {QUANTIZED} from "
            "--swap-recompute."
        )
    one_function = facts.bias_swiglu_fusion or facts.use_te_activation_func if facts.swiglu else True
    if ACTIVATION in kinds and not one_function:
        raise UsageError(
            f"{ours} cannot be combined with --no-bias-swiglu-fusion: the output of an unfused SwiGLU is not that of "
            f"a single function. Drop --no-bias-swiglu-fusion, or {ACTIVATION} from --swap-recompute."
        )


def _check_linear(facts: MegatronFacts, ours: str, kind: str, modules: Sequence[str]) -> None:
    """Refuse flags that are incompatible with running a linear layer again in backward."""
    tensor, of_sum = facts.tensor_model_parallel_size, kind == RESIDUAL
    if of_sum and facts.hidden_dropout > 0:
        raise UsageError(
            f"{ours} needs --hidden-dropout 0; {facts.hidden_dropout:g} is set (Megatron's default is 0.1), and "
            "dropout would drop other values when the sum is computed again. Give it, or drop "
            f"{kind} from --swap-recompute."
        )
    twice = "running twice would update the scaling factors twice"
    gathers = "a linear layer gathers its input from all ranks, which would all have to recompute at the same moment"
    is_sum = "attention's output is a sum over all ranks, which would all have to recompute at the same moment"
    freed = "Megatron frees the norm's output that it reads"
    has_scales = facts.fp8 and facts.fp8_recipe in ("delayed", "custom")
    excluded = [
        (has_scales, f"--fp8-recipe {facts.fp8_recipe}", twice),
        (facts.fp4, f"--fp4-format {facts.fp4}", twice),
        (facts.sequence_parallel and tensor > 1, "--sequence-parallel", gathers),
        (of_sum and tensor > 1, f"--tensor-model-parallel-size {tensor}", is_sum),
        (not of_sum and "layernorm" in modules, "--recompute-modules layernorm", freed),
    ]
    for is_given, flag, why in excluded:
        if is_given:
            instead = f"Drop {kind} from --swap-recompute, or {flag}."
            raise UsageError(f"{ours} cannot be combined with {flag}: {why}. {instead}")


def _check_optimizer(facts: MegatronFacts, settings: Settings) -> None:
    """Refuse flags that read the optimizer's state while it is offloaded, or that store it differently."""
    same = "both would offload the same state"
    reads = "it reads the main parameters between steps, when they are offloaded"
    quantized = "it computes the model's weights from all main parameters at once"
    sharded = "it keeps state in its own buffers"
    graphs = f"--cuda-graph-impl {facts.cuda_graph_impl}"
    types = (facts.exp_avg_dtype, facts.exp_avg_sq_dtype, facts.main_params_dtype)
    has_scales = facts.use_precision_aware_optimizer and any(one in (torch.float16, torch.uint8) for one in types)
    excluded = [
        (
            has_scales and facts.main_params_dtype is torch.float32 and facts.fp8_recipe not in (None, "delayed"),
            f"--fp8-recipe {facts.fp8_recipe} and state in fp16 or 8 bits",
            "Megatron's checkpoints of it have no scales, with and without Megatron Swap",
        ),
        (
            settings.disk_dir is not None and has_scales,
            "--swap-disk-dir with state in fp16 or 8 bits",
            "a scale belongs to a whole parameter, which does not pass through buffers between disk and device",
        ),
        (facts.optimizer_cpu_offload, "--optimizer-cpu-offload", same),
        (facts.optimizer_cuda_graph, "--optimizer-cuda-graph", "a captured step cannot run bucket by bucket"),
        (facts.cuda_graph_impl != "none", graphs, "captured layers call no hooks"),
        (facts.log_params_norm, "--log-params-norm", reads),
        (facts.async_save, "--async-save", "its writer process cannot read offloaded state"),
        (facts.qk_clip, "--qk-clip", "it writes to main parameters between steps, when they are offloaded"),
        (facts.rl_offload_optimizer_during_inference, "--rl-offload-optimizer-during-inference", same),
        (
            facts.fp8_param_gather and facts.fp8_recipe == "mxfp8",
            "--fp8-param-gather with --fp8-recipe mxfp8",
            "it may stage main parameters in the gradients' memory",
        ),
        (
            facts.fp8_param_gather and facts.use_precision_aware_optimizer and facts.fp8_recipe == "delayed",
            "--use-precision-aware-optimizer with --fp8-param-gather and --fp8-recipe delayed",
            "its step scales whole parameters, but parameters are stepped in slices",
        ),
        (facts.fp4_param_gather, "--fp4-param-gather", quantized),
        (facts.use_megatron_fsdp, "--use-megatron-fsdp", sharded),
        (facts.use_torch_fsdp2, "--use-torch-fsdp2", sharded),
    ]
    _refuse(f"--swap-optimizer {settings.offload_fraction:g}", excluded, "--swap-optimizer")


def _check_loss(facts: MegatronFacts, settings: Settings) -> None:
    """Refuse flags with which the output layer cannot run in chunks. ``checked_output`` refuses models."""
    fsdp = "its weights are gathered and freed, and each chunk needs the output layer's"
    graphs = f"--cuda-graph-impl {facts.cuda_graph_impl}"
    excluded = [
        (facts.cuda_graph_impl != "none", graphs, "a graph replays without chunks"),
        (facts.use_megatron_fsdp, "--use-megatron-fsdp", fsdp),
        (facts.use_torch_fsdp2, "--use-torch-fsdp2", fsdp),
    ]
    _refuse(f"--swap-loss-chunks {settings.loss_chunks}", excluded, "--swap-loss-chunks")


def _refuse(ours: str, excluded: Sequence[tuple[object, str, str]], without: str) -> None:
    """Refuse ``ours`` beside the first flag of ``excluded`` that is given: given or not, the flag, why not."""
    for is_given, flag, why in excluded:
        if is_given:
            raise UsageError(f"{ours} cannot be combined with {flag}: {why}. Drop {flag}, or {without}.")


def _asked(settings: Settings) -> tuple[str, str]:
    """Return the flag that turns swapping on, as it was given, and how to turn it off."""
    if settings.plan is not None:
        return f"--swap-plan {settings.plan.file}", "drop --swap-plan"
    if settings.auto:
        return settings.budget_flag, f"drop {settings.budget_flag.split()[0]}"
    if settings.swaps_layers:
        return f"--swap-layers {settings.layers}", "set --swap-layers none"
    if settings.recompute:
        return f"--swap-recompute {' '.join(settings.recompute)}", "drop --swap-recompute"
    return "--swap-oom-guard", "drop --swap-oom-guard"


def _check_combination(facts: MegatronFacts, settings: Settings) -> None:
    same = "both would offload the same tensors"
    graph = "a captured layer replays without saved-tensor hooks"
    shards = "such weights are identified by Python attributes, which saved-tensor hooks do not preserve"
    fsdp = "its weights are gathered and freed, and would be treated as activations"
    parts = "layers run in parts then, by a schedule plan and not by their forward"
    stash = "it stores what experts save by saved-tensor hooks of its own"
    pattern = hybrid_pattern(facts)
    excluded = [
        (facts.overlap_moe_expert_parallel_comm, "--overlap-moe-expert-parallel-comm", parts),
        (facts.moe_paged_stash, "--moe-paged-stash", stash),
        (pattern is not None, str(pattern), "a hybrid model's stack of layers is not swapped"),
        (facts.cpu_offloading_num_layers > 0, f"--cpu-offloading-num-layers {facts.cpu_offloading_num_layers}", same),
        (facts.fine_grained_activation_offloading, "--fine-grained-activation-offloading", same),
        (facts.cuda_graph_impl != "none", f"--cuda-graph-impl {facts.cuda_graph_impl}", graph),
        (facts.gtp_weight_remat_size > 1, "--tensor-parallel-num-weight-shards", shards),
        (facts.use_megatron_fsdp, "--use-megatron-fsdp", fsdp),
        (facts.use_torch_fsdp2, "--use-torch-fsdp2", fsdp),
        (facts.expert_gtp_weight_remat_size > 1, "--expert-tensor-parallel-num-weight-shards", shards),
    ]
    ours, without = _asked(settings)
    _refuse(ours, excluded, without)
    if facts.recompute_granularity != "full":
        return
    if settings.plan is not None or settings.auto:
        raise UsageError(
            f"{ours} cannot be combined with --recompute-granularity full: a plan chooses the recomputed layers. "
            f"Drop --recompute-granularity, or {without}."
        )
    if settings.save_plan is not None:
        raise UsageError(
            f"--swap-save-plan {settings.save_plan} cannot be combined with --recompute-granularity full: a plan file "
            "cannot describe the segments that Megatron recomputes. Drop one of the two."
        )
