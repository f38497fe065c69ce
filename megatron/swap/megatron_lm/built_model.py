"""A model that exists already: its chunks without wrappers, and the facts about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron.swap.common.collectives import rank_and_world_size
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.facts import MegatronFacts
from megatron.swap.megatron_lm.layer import check_stacks
from megatron.swap.megatron_lm.optimizer_adapter import unchained

# Attributes of Megatron's `TransformerConfig` with the names of flags. Older versions lack some.
SAME_NAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "recompute_granularity", "recompute_method", "recompute_num_layers",
    "recompute_modules", "fp8", "fp4", "use_te_activation_func", "multi_latent_attention", "add_bias_linear",
    "gradient_accumulation_fusion", "fine_grained_activation_offloading", "cuda_graph_impl", "variable_seq_lengths",
    "fp8_param", "qk_clip", "fp8_recipe", "first_last_layers_bf16", "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16", "hidden_dropout", "normalization", "apply_rope_fusion", "attention_backend",
    "overlap_moe_expert_parallel_comm", "mlp_chunks_for_training", "gtp_weight_remat_size",
    "expert_gtp_weight_remat_size", "moe_paged_stash",
)  # fmt: skip
# The same of its `OptimizerConfig`.
OF_OPTIMIZER = (
    "optimizer", "use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload",
    "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype",
)  # fmt: skip


def unwrapped(model: nn.Module | Iterable[nn.Module]) -> tuple[list[nn.Module], bool]:
    """Return this rank's model chunks without their wrappers, and whether any was wrapped for data parallelism.

    ``model`` is a chunk, or several in the order of their virtual pipeline stages. Raises a ``UsageError`` if a chunk
    has no ``TransformerBlock``, or if FSDP shards its weights.
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
        if any(chunk is other for other in inner):
            raise UsageError("install: one model chunk is given twice. Pass each chunk of this rank once.")
        inner.append(chunk)
    return inner, is_data_parallel


def facts_of(chunks: Sequence[nn.Module], optimizer: Any) -> MegatronFacts:
    """Return the facts of a model that exists, from its ``chunks`` without wrappers and its optimizer, or None.

    ``seq_length`` and ``micro_batch_size`` are 1, the least, until ``with_batch``: a model does not have them. Raises a
    ``UsageError`` if Megatron's process groups are not its global ones.
    """
    if not parallel_state.is_initialized():
        raise UsageError(
            "install: Megatron's parallel_state is not initialized (decentralized process groups?), so this rank's "
            "place in the pipeline is not known. Call parallel_state.initialize_model_parallel, or do not swap."
        )
    config = max((block.config for chunk in chunks for block in blocks_of(chunk)), key=lambda one: one.num_layers)
    dtype = next((param.dtype for chunk in chunks for param in chunk.parameters()), torch.float32)
    rank, world_size = rank_and_world_size()
    is_of_te = any("transformer_engine" in kind.__module__ for one in chunks[0].modules() for kind in type(one).__mro__)
    found = {name: getattr(config, name) for name in SAME_NAME if hasattr(config, name)} | _of_optimizer(optimizer)
    return MegatronFacts.of(found | {
        "seq_length": 1,
        "micro_batch_size": 1,
        "bf16": config.bf16 or dtype == torch.bfloat16,
        "fp16": config.fp16 or dtype == torch.float16,
        "swiglu": config.gated_linear_unit,
        "bias_swiglu_fusion": config.bias_activation_fusion,
        "num_experts": config.num_moe_experts,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "cpu_offloading_num_layers": config.cpu_offloading_num_layers if config.cpu_offloading else 0,
        "transformer_impl": "transformer_engine" if is_of_te else "local",
        "padded_vocab_size": int(getattr(chunks[0], "vocab_size", 0)) or 1,
        "fp8_param_gather": bool(config.fp8_param),
        "skip_train": True,  # this package has no part in the loop
        "rank": rank,
        "world_size": world_size,
        "local_rank": torch.cuda.current_device() if torch.cuda.is_available() else 0,
        "data_parallel_size": parallel_state.get_data_parallel_world_size(),
    })  # fmt: skip


def with_batch(facts: MegatronFacts, arguments: Sequence[Any], options: Mapping[str, Any]) -> MegatronFacts:
    """Return ``facts`` with the batch of a forward: its first two-dimensional tensor of whole numbers."""
    for value in (*arguments, *options.values()):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            size, length = value.shape
            return replace(facts, micro_batch_size=size, seq_length=length * facts.context_parallel_size)
    return facts


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the facts about ``optimizer``, and Megatron's defaults for the rest."""
    # Work of a loop between steps is not known here: the adapters refuse such features of their frameworks.
    parts = list(unchained(optimizer)) if isinstance(optimizer, MegatronOptimizer) else []
    config = parts[0].config if parts else OptimizerConfig()
    return {name: getattr(config, name) for name in OF_OPTIMIZER}


def blocks_of(chunk: nn.Module) -> list[TransformerBlock]:
    """Return the stacks of layers of a model chunk."""
    found = [module for module in chunk.modules() if isinstance(module, TransformerBlock)]
    return [block for block in found if isinstance(block.config, TransformerConfig)]
