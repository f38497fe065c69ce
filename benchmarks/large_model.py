"""Models of 32 and 70 billion weights, built a layer at a time, so that no weight is twice in host memory.

The model is built without memory. Then each layer gets random bf16 weights, which are drawn on the device. Layers that
stay there are spread evenly over the model, so that the copies of the others have more compute to hide behind.
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


class Filler:
    """Gives random bf16 weights to modules that have none."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.bfloat16)  # grows to the largest parameter

    def fill(self, module: nn.Module, device: str) -> None:
        """Replace the parameters of ``module``, which have no values, by random ones on ``device``; norms by ones."""
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    values = torch.ones(parameter.shape, dtype=torch.bfloat16, device=DEVICE)
                    if values.ndim > 1:
                        values.normal_(std=STD)
                    owner._parameters[name] = nn.Parameter(self._on(values, device), requires_grad=False)

    def _on(self, values: torch.Tensor, device: str) -> torch.Tensor:
        """Return ``values`` on ``device``. Pinned memory on the way makes the copy faster."""
        if values.device.type == device:
            return values
        if self._pinned.numel() < values.numel():
            self._pinned = torch.empty(values.numel(), dtype=torch.bfloat16, pin_memory=True)
        return self._pinned[: values.numel()].view(values.shape).copy_(values).clone()


def evenly(chosen: int, layers: int) -> set[int]:
    """Return the numbers of ``chosen`` of ``layers`` layers, spread evenly."""
    return {number * layers // chosen for number in range(chosen)}


def build(shape: str, num_layers: int | None, device_layers: int | None) -> tuple[Any, list[nn.Module]]:
    """Return a model of transformers with frozen weights, and its layers whose weights are in host memory.

    Args:
        shape: one of ``SHAPES``.
        num_layers: default: as the shape.
        device_layers: layers whose weights are on the device, as are embedding and head; default: all.
    """
    family, sizes = SHAPES[shape]
    config = family(**{**sizes, **({} if num_layers is None else {"num_hidden_layers": num_layers})})
    config.dtype = torch.bfloat16
    torch.manual_seed(1)
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    layers = list(model.model.layers)
    on_device = evenly(len(layers) if device_layers is None else device_layers, len(layers))
    filler = Filler()
    for number, layer in enumerate(layers):
        filler.fill(layer, DEVICE if number in on_device else "cpu")
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        filler.fill(module, DEVICE)
    model.model.rotary_emb.to(DEVICE)
    return model, [layer for number, layer in enumerate(layers) if number not in on_device]
