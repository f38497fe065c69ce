"""Linear layers in 8 bits, many runs in one process: where a start takes half a minute, a process a run is too slow.

    python quantized_script.py RECIPE [RECIPE …]

On a GPU, with TransformerEngine. The recipe ``none`` is bf16 with Megatron's own layers, which run anywhere. Prints one
line of JSON a run: the digest of losses, gradient norms, weights, optimizer state and the quantizers' scales.
"""

import dataclasses
import json
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from megatron import swap
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from benchmarks.runner.fp8_scales import fp8_scales
from megatron.swap.common.plan import load_plan, save_plan
from megatron.swap.megatron_lm.quantized import upstream
from megatron.swap.trainer.upstream import supply_fusion_kernel
from tests.integration.built_script import (
    DEVICE,
    ON_GPU,
    SEQUENCE,
    SMALL,
    VOCABULARY,
    Case,
    digest_of,
    losses_of,
    optimizer_of,
)

TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "tensorwise": TENSORWISE,
    "delayed": {
        "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "first and last layer in bf16": TENSORWISE | {"first_last_layers_bf16": True},
}  # fmt: skip
TRAINING = Case({}, megatrons=True, steps=20 if ON_GPU else 6)


def model_of(recipe: str) -> nn.Module:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, hidden_dropout=0.1,
        attention_dropout=0.0, gradient_accumulation_fusion=recipe != "none", bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, gated_linear_unit=True, activation_func=nn.functional.silu,
        add_bias_linear=False, normalization="RMSNorm", persist_layer_norm=False, masked_softmax_fusion=False,
        bias_activation_fusion=True, bias_dropout_fusion=True, use_cpu_initialization=not ON_GPU,
        deterministic_mode=ON_GPU, **RECIPES[recipe],
    )  # fmt: skip
    supply_fusion_kernel(Namespace(gradient_accumulation_fusion=config.gradient_accumulation_fusion))
    if recipe == "none":
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    else:
        spec = get_gpt_layer_with_transformer_engine_spec()
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=2 * SEQUENCE).to(DEVICE)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    return DistributedDataParallel(config, settings, Float16Module(config, model))


def train(recipe: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    if recipe != "none":
        upstream()[0].reset()  # it knows the scales of earlier runs' layers, and goes on with them
    model = model_of(recipe)
    optimizer = optimizer_of(TRAINING, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    swapped = None if settings is None else swap.install(model, optimizer, **settings)
    losses = list(losses_of(TRAINING, model, optimizer, lambda step: model.set_is_first_microbatch()))
    pairs = zip(before, model.parameters(), strict=True)
    kept = sum(len(getattr(module, "_fp8_workspaces", ())) for module in model.modules())
    row: dict[str, Any] = {"num_copies": kept, "losses": losses}
    row["has_learned"] = not any(torch.equal(*pair) for pair in pairs)
    if swapped is not None:
        recomputer = swapped.parts.recomputer
        row["refused"] = [] if recomputer is None else [str(item) for item in recomputer.refused.items()]
        row["recomputed_bytes"] = 0 if recomputer is None else sum(recomputer.spared_bytes.values())
        row["stats"] = dataclasses.asdict(swapped.stats())
        swapped.close()
    row["num_scales"] = len(list(fp8_scales(model)))
    return {"digest": digest_of(losses, model, optimizer), **row}


def runs_of(recipe: str, folder: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    saved, whole = folder / f"{recipe}.json", folder / f"{recipe}-whole.json"
    kinds = ["norm", "activation"]
    if recipe != "none":
        kinds += ["rotary", "quantized"] + ["linear"] * (recipe != "delayed")
    yield "plain", None
    yield "all layers", {"layers": "all", "config": SMALL | {"verify": True, "save_plan": str(saved)}}
    yield "recomputed", {"layers": "all", "config": SMALL | {"verify": True, "recompute": kinds}}
    if RECIPES[recipe].get("fp8_recipe") in ("tensorwise", "blockwise"):
        without = SMALL | {"recompute": kinds, "fp8_weights": "recompute"}
        yield "weights recomputed", {"layers": "all", "config": without}
    yield "plan", {"plan": str(saved), "config": SMALL}
    plan = load_plan(saved)
    first, *rest = plan.classes
    save_plan(dataclasses.replace(plan, classes=(dataclasses.replace(first, sections=("layer",)), *rest)), whole)
    yield "whole layers", {"plan": str(whole), "config": SMALL}
    yield "state", {"layers": "all", "config": SMALL | {"optimizer": 0.5}}


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("nccl" if ON_GPU else "gloo")
    parallel_state.initialize_model_parallel()
    with tempfile.TemporaryDirectory() as folder:
        for recipe in sys.argv[1:]:
            for name, settings in runs_of(recipe, Path(folder)):
                print(json.dumps({"recipe": recipe, "run": name, **train(recipe, settings)}), flush=True)


if __name__ == "__main__":
    main()
