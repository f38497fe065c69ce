"""Small models of transformers' architectures, by config: no weights, no downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()
VOCABULARY = 64
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
ENCODER = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
IMAGE = {"image_size": 16, "patch_size": 4}
Batch = dict[str, torch.Tensor]


def text(step: int) -> Batch:
    tokens = torch.randint(2, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def pixels(step: int) -> torch.Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(step))


def image(step: int) -> Batch:
    return {"pixel_values": pixels(step), "labels": torch.tensor([0, 2])}


def image_and_text(step: int) -> Batch:
    batch = text(step)
    batch["input_ids"][:, :16] = torch.cat([torch.ones(2, 4, dtype=torch.long), batch["input_ids"][:, 4:]], 1)
    return {**batch, "pixel_values": pixels(step)}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=8))


def qwen3_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**DECODER, head_dim=8, **experts))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4))


def gemma3() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=8, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=4, n_head=2, n_positions=32, **NO_TOKENS)
    return transformers.GPT2LMHeadModel(config)


def gpt_neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**ENCODER, **NO_TOKENS))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_ff=32, d_kv=8, num_layers=3, num_decoder_layers=3, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER))


def albert() -> nn.Module:
    """One layer runs four times."""
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**ENCODER, embedding_size=8))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2, num_labels=3, **IMAGE
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=4, time_step_rank=4, **NO_TOKENS
    )  # fmt: skip
    return transformers.MambaForCausalLM(config)


def llava() -> nn.Module:
    """A vision tower before a Llama. Nobody uses what the tower's last layer returns."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**DECODER), image_token_index=1
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "llama": (llama, text),
    "qwen3": (qwen3, text),
    "mixtral": (mixtral, text),
    "gpt2": (gpt2, text),
    "t5": (t5, text),
    "bert": (bert, text),
    "vit": (vit, image),
    "gemma3": (gemma3, text),
    "qwen3_moe": (qwen3_moe, text),
    "gpt_neox": (gpt_neox, text),
    "mamba": (mamba, text),
    "llava": (llava, image_and_text),
    "albert": (albert, text),
}
"""Model and batches, by name."""
