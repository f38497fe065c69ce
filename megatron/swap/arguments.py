"""The Megatron edge for the command line: the ``--swap-`` flags, and what of Megatron's own they exclude."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from megatron.swap.config import LAYER_SYNTAX, LOG_LEVELS, SwapConfig, parse_layers, parse_steps
from megatron.swap.layer import known_modules
from megatron.swap.profiler import NSYS
from megatron.swap.types import ACTIVATION, LINEAR, NORM, PRODUCERS, UsageError


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
    return parser


def swap_config(args: argparse.Namespace) -> SwapConfig:
    """The checked settings out of Megatron's parsed arguments.

    Raises:
        UsageError: a malformed or impossible value, or a Megatron flag that does not go with swapping.
    """
    config = SwapConfig(
        layers=parse_layers(args.swap_layers, args.num_layers),
        modules=tuple(args.swap_modules),
        recompute=tuple(dict.fromkeys(args.swap_recompute)),
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
    )
    _check_module_names(config.modules)
    _check_upstream(args)
    _check_profile(args, config)
    if config.acts:
        _check_combination(args, config)
        _check_recompute(args, config)
    return config


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
        "--use-megatron-fsdp": (args.use_megatron_fsdp, "its weights are not there again when backward needs them"),
        "--use-torch-fsdp2": (args.use_torch_fsdp2, "its weights are not there again when backward needs them"),
        "--recompute-modules layernorm": ("layernorm" in modules, "Megatron frees the norm's output that it reads"),
    }
    for flag, (given, why) in excluded.items():
        if given:
            raise UsageError(f"{ours} cannot be combined with {flag}: {why}. Drop {LINEAR} from --swap-recompute, or "
                             f"{flag}.")  # fmt: skip


def _check_combination(args: argparse.Namespace, config: SwapConfig) -> None:
    excluded = {
        f"--cpu-offloading-num-layers {args.cpu_offloading_num_layers}": args.cpu_offloading_num_layers > 0,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        f"--cuda-graph-impl {args.cuda_graph_impl}": args.cuda_graph_impl != "none",
    }
    ours, without = f"--swap-layers {args.swap_layers}", "say --swap-layers none"
    if not config.layers:
        ours, without = f"--swap-recompute {' '.join(config.recompute)}", "drop --swap-recompute"
    for flag, given in excluded.items():
        if given:
            why = (
                "a captured layer replays without telling anybody what it saves"
                if "graph" in flag
                else "both would take the same tensors"
            )
            raise UsageError(
                f"{ours} cannot be combined with {flag}: {why}. Drop {flag}, or {without}."
            )
