"""Megatron's parsed arguments, as far as ours read them, without its parser."""

import argparse
from typing import Any

import torch

from megatron.swap.common.flags import add_swap_flags

NAMES: dict[str, Any] = dict(  # noqa: C408
    num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=1,
    group_query_attention=False, kv_channels=16, seq_length=64, micro_batch_size=2, vocab_size=255,
    padded_vocab_size=None, make_vocab_size_divisible_by=128, bf16=False, fp16=False, num_experts=None,
    tensor_model_parallel_size=1, sequence_parallel=False, pipeline_model_parallel_size=1,
    virtual_pipeline_model_parallel_size=None, context_parallel_size=1, expert_model_parallel_size=1,
    data_parallel_size=1, rank=0, local_rank=0, world_size=1, train_iters=5, profile=False, transformer_impl="local",
    swiglu=False, bias_swiglu_fusion=True, use_te_activation_func=False, add_bias_linear=True,
    recompute_granularity=None, recompute_method=None, recompute_modules=None, fp8=None, fp8_recipe="delayed", fp4=None,
    use_megatron_fsdp=False, use_torch_fsdp2=False, cpu_offloading_num_layers=0,
    fine_grained_activation_offloading=False, cuda_graph_impl="none", gtp_weight_remat_size=1,
    expert_gtp_weight_remat_size=1, optimizer_cpu_offload=False, optimizer_cuda_graph=False, log_params_norm=False,
    async_save=False, qk_clip=False, rl_offload_optimizer_during_inference=False, fp8_param_gather=False,
    fp4_param_gather=False, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32,
    main_params_dtype=torch.float32, use_precision_aware_optimizer=False, hidden_dropout=0.0,
    normalization="LayerNorm", overlap_moe_expert_parallel_comm=False,
)  # fmt: skip
"""A tiny model on one rank."""
OF_A_RUN: dict[str, Any] = dict(  # noqa: C408
    distributed_timeout_minutes=10, gradient_accumulation_fusion=True, multi_latent_attention=False,
    init_model_with_meta_device=False, skip_train=False, freeze_all_layers=False, hybrid_layer_pattern=None,
    heterogeneous_layers_config_path=None, untie_embeddings_and_output_weights=True, optimizer="adam",
    accumulate_allreduce_grads_in_fp32=True, use_distributed_optimizer=False, variable_seq_lengths=False,
    tokenizer_type=None,
)  # fmt: skip
"""What the checks of flags do not read, and a whole run does."""


def parsed(flags: str, **theirs: object) -> argparse.Namespace:
    """Return our flags, and Megatron's for the tiny model, with ``theirs`` in their place."""
    args = add_swap_flags(argparse.ArgumentParser()).parse_args(flags.split())
    vars(args).update(NAMES | theirs)
    return args
