"""LoRA of transformers' models by peft, with frozen weights in host memory."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import peft
import pytest
import torch
from megatron import swap
from torch import nn

from megatron.swap.models.found_layers import stacked
from tests.frozen_models import Trained, train
from tests.transformers_models import MODELS
from tests.weight_models import DEVICES


def with_adapters(name: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(7)
    make, _ = MODELS[name]
    modules = {"llama": ["q_proj", "v_proj", "down_proj"], "qwen3_moe": ["q_proj", "o_proj"], "gpt2": ["c_attn"]}[name]
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=modules, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2's Conv1D
        return peft.get_peft_model(make().to(dtype), config).to(dtype).train()


def run(model: nn.Module, name: str, autocast: bool = False) -> Trained:
    def step(model: Any, number: int) -> Any:
        for micro in range(2):
            torch.manual_seed(number)  # of dropout
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = model(**MODELS[name][1](2 * number + micro)).loss
            loss.backward()
            yield loss

    return train(model, step)  # type: ignore[arg-type]


def checkpointed(model: Any, use_reentrant: bool) -> None:
    model.base_model.model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()


def nothing(model: nn.Module) -> AbstractContextManager[Any]:
    return nullcontext()


def activations(model: nn.Module) -> AbstractContextManager[Any]:
    return swap.activations(model, "0-2", min_mib=0, cpu_delay_ms=1)


CASES: dict[str, tuple[str, torch.dtype, dict[str, Any], bool | None, Callable[..., Any]]] = {
    "bf16, dropout": ("llama", torch.bfloat16, {"lora_dropout": 0.1}, None, nothing),
    "reentrant checkpoints": ("llama", torch.float32, {}, True, nothing),
    "activations of checkpoints": ("llama", torch.bfloat16, {}, False, activations),
    "DoRA reads frozen weights": ("llama", torch.float32, {"use_dora": True}, False, nothing),
    "experts": ("qwen3_moe", torch.float32, {}, None, nothing),
    "GPT-2": ("gpt2", torch.float32, {}, False, activations),
}
SLOW = ("reentrant checkpoints", "DoRA reads frozen weights", "experts", "GPT-2")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_as_without(case: str) -> None:
    name, dtype, options, use_reentrant, context = CASES[case]
    model = with_adapters(name, dtype, **options)
    if use_reentrant is not None:
        checkpointed(model, use_reentrant)
    alone = run(copy.deepcopy(model), name)
    for kind in ("emulated", "lazy"):
        trained, device = copy.deepcopy(model), DEVICES[kind]()
        with swap.weights(trained, training=True, device=device) as swapped:
            assert len(swapped._layers) == 4
            with context(trained):
                assert run(trained, name) == alone
            stats = swapped.stats
        assert stats.buffer_peak_bytes == stats.buffer_bytes
        assert stats.num_late <= 4  # at turns of forward and backward, as long as they are not learned
        device.close()
        assert getattr(device, "violations", []) == []


def test_autocast_saves_casts_as_activations() -> None:
    """Autocast casts frozen float32 weights in forward. The casts are saved as they are without swapping."""
    model = with_adapters("llama", torch.float32)
    alone = run(copy.deepcopy(model), "llama", autocast=True)
    with swap.weights(model, training=True) as swapped:
        assert run(model, "llama", autocast=True) == alone
        assert swapped.stats.buffer_peak_bytes == swapped.stats.buffer_bytes
        with swap.activations(model, "0-2", min_mib=0) as offloaded:
            run(model, "llama", autocast=True)
        cast_bytes = sum(layer.mlp.up_proj.weight.nbytes // 2 for layer in list(stacked(model))[:3])
        assert offloaded.stats().out_bytes > 3 * 2 * cast_bytes
