"""Small models of transformers' architectures, by config: no weights, no downloads."""

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
OF_IMAGES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
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


def gemma3() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=8, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def llava() -> nn.Module:
    """A vision tower before a Llama. Nobody uses what the tower's last layer returns."""
    vision = transformers.CLIPVisionConfig(**OF_IMAGES, num_hidden_layers=3, image_size=16, patch_size=8)
    text_config = transformers.LlamaConfig(**DECODER)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text_config, image_token_index=1)
    return transformers.LlavaForConditionalGeneration(config)


def of(name: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    """Return the function that makes a model: ``name`` and ``kind`` are parts of its class's name."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        return getattr(transformers, f"{name}{kind}")(config)

    return make


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 3, "num_decoder_layers": 3,
    "num_heads": 2, "decoder_start_token_id": 0,
}  # fmt: skip
VIT: dict[str, Any] = {**OF_IMAGES, "num_hidden_layers": 6, "num_labels": 3, "image_size": 16, "patch_size": 4}
MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4, "time_step_rank": 4,
}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "llama": (llama, text),
    "qwen3": (of("Qwen3", "ForCausalLM", **DECODER, head_dim=8), text),
    "mixtral": (of("Mixtral", "ForCausalLM", **DECODER, num_local_experts=4), text),
    "gpt2": (of("GPT2", "LMHeadModel", **GPT2, **NO_TOKENS), text),
    "t5": (of("T5", "ForConditionalGeneration", **T5), text),
    "bert": (of("Bert", "ForMaskedLM", **ENCODER), text),
    "vit": (of("ViT", "ForImageClassification", **VIT), image),
    "gemma3": (gemma3, text),
    "qwen3_moe": (of("Qwen3Moe", "ForCausalLM", **DECODER, head_dim=8, **EXPERTS), text),
    "gpt_neox": (of("GPTNeoX", "ForCausalLM", **ENCODER, **NO_TOKENS), text),
    "mamba": (of("Mamba", "ForCausalLM", **MAMBA, **NO_TOKENS), text),
    "llava": (llava, image_and_text),
    "albert": (of("Albert", "ForMaskedLM", **ENCODER, embedding_size=8), text),  # one layer runs four times
}
"""Model and batches, by name."""
