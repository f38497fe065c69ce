"""A user's training script with its own model, data and loss. Comments mark the lines of ours."""

# ruff: noqa: E402

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from megatron.swap.prepare import prepare

prepare(sys.argv)  # ours; only needed without CUDA

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.gpt import GPTModelConfig

from megatron.swap.arguments import add_swap_args
from megatron.swap.session import SwapSession


def add_my_args(parser: Any) -> Any:
    parser.add_argument("--my-depth", type=int, default=6)
    return add_swap_args(parser)  # ours


def my_model(args: Any) -> GPTModelConfig:
    transformer = TransformerConfig(
        num_layers=args.my_depth, hidden_size=96, ffn_hidden_size=256, num_attention_heads=6,
        num_query_groups=3,
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
        apply_rope_fusion=False, transformer_impl="local", hidden_dropout=0.05, attention_dropout=0.0,
    )  # fmt: skip
    return GPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=args.padded_vocab_size,
        seq_length=args.seq_length,
        position_embedding_type="rope",
    )


def my_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, split="90,5,5", tokenizer=get_tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=True,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


my_datasets.is_distributed = True  # type: ignore[attr-defined]


def my_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    return total, num_tokens, {"my loss": torch.stack([total.detach(), num_tokens.float()])}


def my_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = {key: value.cuda() for key, value in next(data).items()}
    losses = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return losses, partial(my_loss, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_my_args)
    args.num_layers = args.my_depth
    model = my_model(args)
    SwapSession.install(args, model)  # ours
    container = pretrain_cfg_container_from_args(args, model)
    pretrain(container, my_datasets, ModelType.encoder_or_decoder, my_step)
