"""Training loops around Megatron models that exist already, with ``swap.install`` and without.

    python built_script.py CASE [CASE …]

It needs megatron.core alone. It prints one line of JSON a case: the digest of losses, gradient norms, weights and
optimizer state without swapping, and the same with it, with the figures of ``stats()``.
"""

# ruff: noqa: E402

import dataclasses
import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

from benchmarks.runner.fp8_scales import fp8_scales
from megatron.swap.patches import cpu, registry

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    registry.apply(cpu.CORE_PATCHES)  # torch.cuda's calls in Megatron

import megatron.core
from megatron import swap
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

SEQUENCE, VOCABULARY, LAYERS = 64, 128, 6
OVERRIDDEN = {"forward", "compute_language_model_loss"}
SMALL = {"min_mib": 0.001, "host_gib": 0.5, "host_unchecked": True, "log_level": "quiet"}
if ON_GPU:
    torch.use_deterministic_algorithms(True)
else:
    SMALL["cpu_delay_ms"] = 0.2
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Install = Callable[[nn.Module, Any], swap.Run]


class RenamedLayer(TransformerLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, context = super().forward(*args, **kwargs)
        return hidden * 1.01, context


class OwnModel(GPTModel):
    """A fork's model: its forward takes a batch, and its layers are renamed."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        settings: of ``install``, which is called before step ``at``.
        megatrons: bf16, Megatron's wrappers and its optimizer, the ``distributed`` one; else fp32 and torch's AdamW.
        options: of the model's config.
        peeks: each micro-batch begins with a pass without gradients, as a reference model's.
    """

    settings: dict[str, Any]
    megatrons: bool = False
    distributed: bool = False
    at: int = 0
    of_fork: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    peeks: bool = False
    steps: int = 5


TRAINING = ("megatrons", "distributed", "of_fork", "options", "peeks", "steps")
"""The fields of a case that matter without swapping."""
PLAIN: dict[str, dict[str, Any]] = {}
"""Runs without swapping. Cases that train alike share one."""


def planned(memory_gib: float, **more: Any) -> dict[str, Any]:
    return {"memory_gib": memory_gib, "config": SMALL | more}


ALL = {"layers": "all", "config": SMALL}
CASES = {
    "layers": Case(ALL),
    "recompute": Case({"layers": "0-3", "config": SMALL | {"recompute": ["norm", "activation"], "verify": True}}),
    "budget": Case(planned(0.0028), steps=14),
    "loss": Case({"layers": "all", "config": SMALL | {"loss_chunks": 1}}, megatrons=True, peeks=True, at=1),
    "during training": Case(ALL, megatrons=True, at=2),
    "state": Case({"layers": "all", "config": SMALL | {"optimizer": 0.5}}, megatrons=True),
    "distributed state during training": Case(
        {"layers": "all", "config": SMALL | {"optimizer": 0.5}}, megatrons=True, distributed=True, at=2
    ),
    "budget with state": Case(planned(0.003, optimizer="auto"), megatrons=True, distributed=True, steps=16),
    "fork": Case(ALL, of_fork=True),
    "full recomputation": Case(ALL, options={
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    }),
    "passes without gradients": Case(planned(0.0028), peeks=True, steps=14),
}  # fmt: skip


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    half = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16} if case.megatrons else {}
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.1,
        attention_dropout=0.0, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False, **half, **case.options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    if case.of_fork:
        spec = dataclasses.replace(spec, module=RenamedLayer)
    kind = OwnModel if case.of_fork else GPTModel
    model: nn.Module = kind(config, spec, vocab_size=VOCABULARY, max_sequence_length=2 * SEQUENCE).to(DEVICE)
    if not case.megatrons:
        return model
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=case.distributed, overlap_grad_reduce=False
    )
    return DistributedDataParallel(config, settings, Float16Module(config, model))


def optimizer_of(case: Case, model: nn.Module) -> Any:
    if not case.megatrons:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=case.distributed
    )
    return get_megatron_optimizer(settings, [model])


def inner_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    return [one.optimizer for one in getattr(optimizer, "chained_optimizers", [])] or [optimizer]


def losses_of(case: Case, model: nn.Module, optimizer: Any, before: Callable[[int], None]) -> Iterator[float]:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    positions = torch.arange(SEQUENCE, device=DEVICE)[None].expand(2, -1)
    mask = torch.ones(SEQUENCE, SEQUENCE, device=DEVICE).triu(1).bool()[None, None]
    for step in range(case.steps):
        before(step)
        if case.megatrons:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        for _ in range(2):
            drawn = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator).to(DEVICE)
            tokens, labels = drawn[:, :-1], drawn[:, 1:]
            batch = {"tokens": tokens, "positions": positions, "mask": mask, "labels": labels}
            if case.peeks:
                with torch.no_grad():
                    model(tokens, positions, mask, labels=labels)
            loss = (model(batch) if case.of_fork else model(tokens, positions, mask, labels=labels)).mean()
            loss.backward()
            yield loss.item()
        if case.megatrons:
            finalize_model_grads([model])
            yield float(optimizer.step()[1])
        else:
            optimizer.step()
        with torch.no_grad():  # an evaluation is no part of a step
            model.eval()
            model(batch) if case.of_fork else model(tokens, positions, mask, labels=labels)
            model.train()


def digest_of(losses: list[float], model: nn.Module, optimizer: Any) -> str:
    """Return the digest of ``losses``, weights, optimizer state, and the scales of 8-bit layers."""
    state = [
        value for one in inner_of(optimizer) for group in one.param_groups for param in group["params"]
        for value in (param, *(value for _, value in sorted(one.state[param].items())))
    ]  # fmt: skip
    digest = hashlib.sha256(repr(losses).encode())
    for value in (*model.parameters(), *state, *fp8_scales(model)):
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def run(case: Case, *, swaps: bool) -> dict[str, Any]:
    model = model_of(case)
    optimizer = optimizer_of(case, model)
    swapped: swap.Run | None = None

    def before(step: int) -> None:
        nonlocal swapped
        if not swaps:
            return
        if step == case.at:
            swapped = swap.install(model, optimizer, **case.settings)

    losses = list(losses_of(case, model, optimizer, before))
    stats = None
    if swapped is not None:
        stats = dataclasses.asdict(swapped.stats())
        swapped.close()
        swapped.close()
    left = [name for name, module in model.named_modules() if OVERRIDDEN & set(vars(module))]
    return {"digest": digest_of(losses, model, optimizer), "losses": losses, "stats": stats, "left": left}


def unswapped(case: Case) -> dict[str, Any]:
    plain = Case({}, **{name: getattr(case, name) for name in TRAINING})
    if (key := repr(plain)) not in PLAIN:
        PLAIN[key] = run(plain, swaps=False)
    return PLAIN[key]


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("nccl" if ON_GPU else "gloo")
    parallel_state.initialize_model_parallel()
    for name in sys.argv[1:]:
        case = CASES[name]
        plain, swapped = unswapped(case), run(case, swaps=True)
        row = {"case": name, "version": megatron.core.__version__.split("+")[0], "file": megatron.core.__file__,
               "plain": plain, "swapped": swapped}  # fmt: skip
        if torch.distributed.get_rank() == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
