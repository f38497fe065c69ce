"""A model that exists already: its chunks without wrappers, and what Megatron's flags would say of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.swap.common.command_line import CommandLine, nearest_flag
from megatron.swap.common.types import UsageError
from megatron.swap.megatron_lm.arguments import add_swap_flags
from megatron.swap.megatron_lm.layer import check_stacks
from megatron.swap.megatron_lm.optimizer_adapter import stepped_params, unchained
from megatron.swap.megatron_lm.versions import ADDED_LATER

PREFIX = "--swap-"
OF_TRAINER = {
    "summary": "stats() has the figures of this rank",
    "deterministic": "choose deterministic kernels where you build the model",
}
"""Settings that only runs of Megatron's trainer have, and what to do instead."""
SAME_NAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "fp8", "fp4", "use_te_activation_func", "multi_latent_attention", "add_bias_linear",
    "gradient_accumulation_fusion", "fine_grained_activation_offloading", "cuda_graph_impl", "variable_seq_lengths",
    "fp8_param", "qk_clip", "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16", "hidden_dropout", "normalization", "apply_rope_fusion", "attention_backend",
    "overlap_moe_expert_parallel_comm",
)  # fmt: skip
"""Attributes of Megatron's ``TransformerConfig`` that have the names of the flags."""


def parse_settings(settings: Mapping[str, Any]) -> Namespace:
    """Return what the ``--swap-`` flags would give: ``{"min_mib": 0.1}`` stands for ``--swap-min-mib 0.1``.

    Args:
        settings: names of flags without ``--swap-``, with underscores. ``None`` and ``False`` leave a flag out.

    Raises:
        UsageError: an unknown name, a malformed value, or a setting of Megatron's trainer alone.
    """
    parser = _Settings(add_help=False, allow_abbrev=False)
    add_swap_flags(parser)
    actions = {action.dest.removeprefix("swap_"): action for action in parser._actions}
    known = list(actions)
    words: list[str] = []
    for name, value in settings.items():
        if not isinstance(name, str):
            raise UsageError(f"{name!r}: is no name of a setting, such as 'min_mib'.")
        if name in OF_TRAINER:
            raise UsageError(f"{name}: is a setting of runs of Megatron's trainer; {OF_TRAINER[name]}. Leave it out.")
        if name not in known:
            near = nearest_flag(name, known)
            raise UsageError(f"{name}: there is no such setting. " + (f"The nearest is {near}." if near else
                             f"There are {', '.join(one for one in known if one not in OF_TRAINER)}."))  # fmt: skip
        if value is None or value is False:
            continue
        is_switch = actions[name].nargs == 0
        if is_switch != (value is True):
            allowed = "True or False" if is_switch else "a value"
            raise UsageError(f"{name}: {value!r} is given; it must be {allowed}.")
        flag = PREFIX + name.replace("_", "-")
        if actions[name].nargs == "+":
            words += [flag, *map(str, [value] if isinstance(value, str) else value)]
        else:
            words.append(flag if is_switch else f"{flag}={value}")
    return parser.parse_args(words)


class _Settings(CommandLine):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message if message.endswith(".") else f"{message}.")


def unwrapped(model: nn.Module | Iterable[nn.Module]) -> tuple[list[nn.Module], bool]:
    """Return this rank's model chunks without their wrappers, and whether any was wrapped for data parallelism.

    Args:
        model: a chunk, or several: those of the virtual pipeline stages, in their order.

    Raises:
        UsageError: a chunk has no ``TransformerBlock``, or its weights are sharded by FSDP.
    """
    is_one = isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList)
    chunks = list(model) if isinstance(model, Iterable) and not is_one else [model]
    if not chunks:
        raise UsageError("install: the list of model chunks is empty. Pass the chunks of this rank.")
    inner: list[nn.Module] = []
    is_data_parallel = False
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise UsageError(f"install: {type(chunk).__name__} is no module. Pass this rank's model chunks.")
        while isinstance(wrapped := getattr(chunk, "module", None), nn.Module):
            if "FullyShardedDataParallel" in type(chunk).__name__:
                raise UsageError(
                    f"install: the model is wrapped in {type(chunk).__name__}. Its weights are gathered and freed, and "
                    "would be treated as activations. Wrap it in Megatron's DistributedDataParallel, or do not swap."
                )
            is_data_parallel |= not isinstance(chunk, Float16Module)
            chunk = wrapped
        if not blocks_of(chunk):
            check_stacks([chunk])
            raise UsageError(
                f"install: {type(chunk).__name__} has no TransformerBlock of Megatron, so there are no layers to swap. "
                "Models of other frameworks, and layers outside such a block: swap.activations(model, layers)."
            )
        inner.append(chunk)
    return inner, is_data_parallel


def check_optimizer(optimizer: Any, chunks: Sequence[nn.Module]) -> None:
    """Refuse what is no optimizer of these chunks' parameters. ``None``: it is not given.

    Raises:
        UsageError: says what was given, and what to give.
    """
    if optimizer is None:
        return
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    mine = {id(param) for chunk in chunks for param in chunk.parameters()}
    if kind is optimizer:
        wrong = "is a class"
    elif any("Scheduler" in base.__name__ for base in kind.__mro__):
        wrong = "schedules learning rates"
    elif not callable(getattr(optimizer, "step", None)):
        wrong = "has no step"
    elif (stepped := stepped_params(optimizer)) and not any(id(param) in mine for param in stepped):
        wrong = f"steps {len(stepped)} parameters, and none of them is this model's"
    else:
        return
    raise UsageError(
        f"optimizer: {kind.__name__} {wrong}. Pass the optimizer that was made for this model, Megatron's or torch's; "
        "or leave it out: a step then ends when any optimizer of the model's parameters has stepped."
    )


def args_of(chunks: Sequence[nn.Module], optimizer: Any, settings: Namespace) -> Namespace:
    """Return what Megatron's parsed arguments would be for a model that exists.

    ``seq_length`` and ``micro_batch_size`` are 1, the least, until ``note_batch``: a model does not say them.

    Args:
        chunks: of this rank, without wrappers.
        optimizer: Megatron's or torch's; ``None``: it is not known.
        settings: from ``parse_settings``.

    Raises:
        UsageError: Megatron's process groups are not its global ones.
    """
    if not parallel_state.is_initialized():
        raise UsageError(
            "install: Megatron's parallel_state is not initialized (decentralized process groups?), so this rank's "
            "place in the pipeline is not known. Call parallel_state.initialize_model_parallel, or do not swap."
        )
    config = max((block.config for chunk in chunks for block in blocks_of(chunk)), key=lambda one: one.num_layers)
    dtype = next((param.dtype for chunk in chunks for param in chunk.parameters()), torch.float32)
    offloads = config.cpu_offloading
    args = Namespace(
        **{name: getattr(config, name) for name in SAME_NAME},
        **{name: getattr(config, name, default) for name, default in ADDED_LATER.items()},
        **vars(settings),
    )
    args.bf16 = config.bf16 or dtype == torch.bfloat16
    args.fp16 = config.fp16 or dtype == torch.float16
    args.swiglu = config.gated_linear_unit
    args.bias_swiglu_fusion = config.bias_activation_fusion
    args.num_experts = config.num_moe_experts
    args.mlp_chunks_for_training = getattr(config, "mlp_chunks_for_training", 1)  # since 0.18
    args.group_query_attention = config.num_query_groups != config.num_attention_heads
    args.cpu_offloading_num_layers = config.cpu_offloading_num_layers if offloads else 0
    args.transformer_impl = "transformer_engine" if any(map(_is_of_te, chunks[0].modules())) else "local"
    args.padded_vocab_size = args.vocab_size = int(getattr(chunks[0], "vocab_size", 0)) or 1
    args.seq_length = args.micro_batch_size = 1
    args.use_megatron_fsdp = args.use_torch_fsdp2 = args.profile = False  # ``unwrapped`` refuses the first two
    args.train_iters = args.train_samples = None
    args.skip_train = True  # this package has no part in the loop
    args.rank, args.world_size = _rank_and_world_size()
    args.distributed_timeout_minutes = None
    args.local_rank = torch.cuda.current_device() if torch.cuda.is_available() else 0
    args.data_parallel_size = parallel_state.get_data_parallel_world_size()
    _add_optimizer(args, optimizer)
    return args


def note_batch(args: Namespace, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Set ``seq_length`` and ``micro_batch_size`` by the first two-dimensional tensor of a forward's arguments."""
    for value in (*arguments, *options.values()):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            args.micro_batch_size, args.seq_length = value.shape[0], value.shape[1] * args.context_parallel_size
            return


def _add_optimizer(args: Namespace, optimizer: Any) -> None:
    """Add what the flags would say of ``optimizer``; Megatron's defaults where it does not say it."""
    parts = list(unchained(optimizer)) if isinstance(optimizer, MegatronOptimizer) else []
    config = parts[0].config if parts else OptimizerConfig()
    for name in ("optimizer", "use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload",
                 "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype"):  # fmt: skip
        setattr(args, name, getattr(config, name))
    args.num_distributed_optimizer_instances = 1
    # What a loop does between steps is not known here: the adapters refuse what their frameworks can do of it.
    args.optimizer_cuda_graph = args.log_params_norm = args.async_save = False
    args.rl_offload_optimizer_during_inference = False
    args.fp8_param_gather, args.fp4_param_gather = bool(args.fp8_param), False


def blocks_of(chunk: nn.Module) -> list[TransformerBlock]:
    """Return the stacks of layers of a model chunk."""
    found = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    return [block for block in found if isinstance(block.config, TransformerConfig)]


def _is_of_te(module: nn.Module) -> bool:
    return any("transformer_engine" in kind.__module__ for kind in type(module).__mro__)


def _rank_and_world_size() -> tuple[int, int]:
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
