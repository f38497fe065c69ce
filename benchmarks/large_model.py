"""Models of 32 and 70 billion weights, whose weights are never in host memory twice.

``build`` gives the layers memory that is not written to, so that it takes no pages. ``swap.weights`` moves it to pinned
memory. Then ``fill`` draws the values on the device. Layers that stay on the device are spread evenly over the model:
copies of the others have more compute to hide behind.
"""

from __future__ import annotations

from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
import transformers
from torch import nn

from benchmarks.training_loop import DEVICE

SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "70b": (transformers.LlamaConfig, {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }),
    "32b": (transformers.Qwen3Config, {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }),
    "tiny": (transformers.Qwen3Config, {
        "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    }),
}  # fmt: skip
"""Llama 3 70B, Qwen3 32B, and one for tests."""
STD = 0.02


def evenly(chosen: int, layers: int) -> set[int]:
    """Return the numbers of ``chosen`` of ``layers`` layers, spread evenly."""
    return {number * layers // chosen for number in range(chosen)}


def build(
    shape: str, num_layers: int | None, device_layers: int | None, fused_norms: bool = False, attention: str = "sdpa"
) -> tuple[Any, list[nn.Module]]:
    """Return a model of transformers, frozen and without values, and its layers whose weights are in host memory.

    Args:
        shape: one of ``SHAPES``.
        num_layers: default: as the shape.
        device_layers: layers whose weights are on the device, as are embedding and head; default: all.
        fused_norms: replace transformers' RMS norms, eight operators each, by PyTorch's, one kernel.
        attention: transformers' name of its implementation.
    """
    family, sizes = SHAPES[shape]
    config = family(**{**sizes, **({} if num_layers is None else {"num_hidden_layers": num_layers})})
    config.dtype = torch.bfloat16
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if fused_norms:
        _fuse_norms(model)
    layers = list(model.model.layers)
    on_device = evenly(len(layers) if device_layers is None else device_layers, len(layers))
    for number, layer in enumerate(layers):
        layer.to_empty(device=DEVICE if number in on_device else "cpu")
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        module.to_empty(device=DEVICE)
    model.model.rotary_emb.to(DEVICE)
    return model.requires_grad_(False), [layer for number, layer in enumerate(layers) if number not in on_device]


def _fuse_norms(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__.endswith("RMSNorm"):
                old: Any = norm
                new = nn.RMSNorm(old.weight.shape, old.variance_epsilon, device="meta", dtype=old.weight.dtype)
                setattr(module, name, new)


def layers_of(model: Any, host_layers: list[nn.Module]) -> dict[str, int]:
    """Return the fields of a row: layers, and those whose weights are on the device."""
    num_layers = len(model.model.layers)
    return {"layers": num_layers, "device_layers": num_layers - len(host_layers)}


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give random values to all frozen weights, and ones to norms, the same wherever the weights are."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            values = torch.ones(parameter.shape, dtype=parameter.dtype, device=DEVICE)
            parameter.copy_(values.normal_(std=STD) if values.ndim > 1 else values)
