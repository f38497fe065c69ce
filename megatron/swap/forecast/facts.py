"""Facts of a Megatron run that planning, checks and offloading need, whether read from flags or from a model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from megatron.swap.common.plan import KEPT, Model
from megatron.swap.common.rounding import round_up
from megatron.swap.common.types import UsageError
from megatron.swap.forecast.attention import takes_flash
from megatron.swap.forecast.states import type_bytes


@dataclass(frozen=True, kw_only=True)
class MegatronFacts:
    """A Megatron run. Fields have the names, values and defaults of Megatron's parsed arguments."""

    # The model.
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    ffn_hidden_size: int | None = None
    group_query_attention: bool = False
    num_query_groups: int = 1
    kv_channels: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    make_vocab_size_divisible_by: int = 128
    untie_embeddings_and_output_weights: bool = False
    transformer_impl: str = "transformer_engine"
    bf16: bool = False
    fp16: bool = False
    swiglu: bool = False
    bias_swiglu_fusion: bool = True
    use_te_activation_func: bool = False
    add_bias_linear: bool = True
    normalization: str = "LayerNorm"
    hidden_dropout: float = 0.1
    num_experts: int | None = None
    multi_latent_attention: bool = False
    attention_backend: Any = "auto"
    apply_rope_fusion: bool = True
    mlp_chunks_for_training: int = 1
    variable_seq_lengths: bool = False
    hybrid_layer_pattern: str | None = None
    hybrid_override_pattern: str | None = None
    heterogeneous_layers_config_path: str | None = None
    init_model_with_meta_device: bool = False
    freeze_all_layers: bool = False

    # Types of low precision. None: not used.
    fp8: str | None = None
    fp8_recipe: str | None = "delayed"
    fp8_param: bool = False
    fp8_param_gather: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    use_transformer_engine_op_fuser: bool = False
    fp4: str | None = None
    fp4_param_gather: bool = False

    # Ranks.
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    data_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    num_distributed_optimizer_instances: int = 1
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = False
    gtp_weight_remat_size: int = 1
    expert_gtp_weight_remat_size: int = 1
    overlap_moe_expert_parallel_comm: bool = False
    distributed_timeout_minutes: int | None = None

    # The optimizer. Types are torch's, or named as flags name them.
    optimizer: str = "adam"
    use_distributed_optimizer: bool = False
    use_precision_aware_optimizer: bool = False
    main_params_dtype: Any = "fp32"
    main_grads_dtype: Any = "fp32"
    exp_avg_dtype: Any = "fp32"
    exp_avg_sq_dtype: Any = "fp32"
    grad_reduce_in_bf16: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    gradient_accumulation_fusion: bool = True
    optimizer_cpu_offload: bool = False
    optimizer_cuda_graph: bool = False
    log_params_norm: bool = False
    async_save: bool = False
    qk_clip: bool = False
    rl_offload_optimizer_during_inference: bool = False

    # Megatron's own means to save memory.
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    cpu_offloading_num_layers: int = 0
    fine_grained_activation_offloading: bool = False
    moe_paged_stash: bool = False
    cuda_graph_impl: str = "none"

    # The loop.
    train_iters: int | None = None
    train_samples: int | None = None
    skip_train: bool = False
    profile: bool = False

    @property
    def head_size(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def mlp_width(self) -> int:
        # Megatron's default: four times the hidden size; with a gate two thirds of that, a multiple of 64.
        default = int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.swiglu else 4 * self.hidden_size
        return self.ffn_hidden_size or default

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the facts among ``given``, arguments by name."""
        # Older versions of Megatron lack some names, which keep their defaults.
        return cls(**{one.name: given[one.name] for one in fields(cls) if one.name in given})


def state_bytes_of(facts: MegatronFacts) -> int:
    """Return ``States.state_bytes`` for Adam: an upper bound for other optimizers."""
    if not facts.use_precision_aware_optimizer:
        return 12 if facts.bf16 or facts.fp16 else 8
    main = type_bytes(facts.main_params_dtype)
    moments = type_bytes(facts.exp_avg_dtype) + type_bytes(facts.exp_avg_sq_dtype)
    if main == 4 and holds_main_params(facts) and facts.bf16 and not facts.fp8_param_gather:
        main = 2  # 16 bits of the main value; the bf16 weight has the other 16
    return (main if facts.bf16 or facts.fp16 else 0) + moments


def holds_main_params(facts: MegatronFacts) -> bool:
    """Whether the optimizer itself holds the main values, and takes gradients in 16 bits."""
    # TransformerEngine's precision-aware optimizer does, except with FP8 recipes of current scaling (Megatron's
    # ``use_precision_aware_optimizer_no_fp8_or_ds_fp8``).
    is_short = type_bytes(facts.main_params_dtype) < 4
    return facts.use_precision_aware_optimizer and (is_short or facts.fp8_recipe in (None, "delayed"))


def has_sum_in_loss(facts: MegatronFacts) -> bool:
    """Whether several chunks of the loss hold the sum of the output weight's gradients, in fp32."""
    # Otherwise they add to Megatron's own gradient, in a layer that fuses that with a gradient in fp32.
    return has_short_gradients(facts) or not facts.gradient_accumulation_fusion


def has_short_gradients(facts: MegatronFacts) -> bool:
    is_short = type_bytes(facts.main_grads_dtype) < 4 or facts.grad_reduce_in_bf16
    return bool(facts.bf16) and is_short


def model_of(facts: MegatronFacts, fp8_weights: str | None = None) -> Model:
    """Return the model, or raise ``UsageError`` if the vocabulary's size is missing. None means Megatron's default."""
    tensor, heads = facts.tensor_model_parallel_size, facts.num_attention_heads
    return Model(
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        ffn_hidden_size=facts.mlp_width,
        num_attention_heads=heads,
        num_query_groups=facts.num_query_groups if facts.group_query_attention else heads,
        seq_length=facts.seq_length,
        micro_batch_size=facts.micro_batch_size,
        padded_vocab_size=_padded_vocab_size(facts),
        transformer_impl=facts.transformer_impl,
        dtype="bf16" if facts.bf16 else "fp16" if facts.fp16 else "fp32",
        gated=facts.swiglu,
        num_experts=facts.num_experts,
        # Megatron fills in kv_channels if it is not given. The same size must give an equal Model either way.
        head_size=None if facts.kv_channels in (None, facts.hidden_size // heads) else facts.kv_channels,
        tensor_parallel=tensor,
        sequence_parallel=facts.sequence_parallel and tensor > 1,
        pipeline_parallel=facts.pipeline_model_parallel_size,
        num_virtual_stages=facts.virtual_pipeline_model_parallel_size or 1,
        context_parallel=facts.context_parallel_size,
        expert_parallel=facts.expert_model_parallel_size,
        fp8_recipe=facts.fp8_recipe if facts.fp8 else None,
        bf16_layers=_bf16_layers(facts) if facts.fp8 and facts.first_last_layers_bf16 else (),
        swap_fp8_weights=fp8_weights or KEPT,
        mlp_chunks=(num_chunks := max(1, facts.mlp_chunks_for_training or 1)),
        flash_attention=takes_flash(facts.attention_backend, facts.transformer_impl),
        mlp_statistics=None if num_chunks == 1 else 1 if facts.normalization == "RMSNorm" else 2,
    )


def _bf16_layers(facts: MegatronFacts) -> tuple[int, ...]:
    first, last = facts.num_layers_at_start_in_bf16, facts.num_layers - facts.num_layers_at_end_in_bf16
    return tuple(layer for layer in range(facts.num_layers) if layer < first or layer >= last)


def _padded_vocab_size(facts: MegatronFacts) -> int:
    if facts.padded_vocab_size is not None:
        return facts.padded_vocab_size
    if facts.vocab_size is None:
        raise UsageError("a plan needs the size of the vocabulary: give --vocab-size or --padded-vocab-size.")
    multiple = facts.make_vocab_size_divisible_by * facts.tensor_model_parallel_size
    return round_up(facts.vocab_size, multiple)
