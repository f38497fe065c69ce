"""LoRA of a model of 32 or 70 billion weights on one GPU, with frozen weights in host memory (``swap.weights``).

    python -m benchmarks.lora --shape 70b --device-layers 28
    python -m benchmarks.lora --shape 32b --device-layers 0

prints a line of JSON: tokens per second, the milliseconds of a step, the most device memory allocated and reserved, the
pinned host memory, the losses of the first two steps per token, and the seconds until the first step. Random bf16
weights; adapters of bf16 on all linear layers of attention and MLP, or ``--adapters q-v``; one sequence a step; AdamW.
The weights of --device-layers stay on the device, by default all. The loss is computed in chunks. Layers are
checkpointed by transformers. ``--activations offload`` has transformers copy the checkpoints to host memory.
``--activations 0-79`` swaps the checkpoints of layers 0 to 79; with transformers before 5.23 that is refused, because
layers run inside a checkpoint as a whole. ``--activations 60.0`` plans the activations for a budget of 60 GiB, in place
of checkpointing, with at most --host-gib of host memory. ``--attention cudnn`` has PyTorch take cuDNN's attention in
place of its own, and ``--norms torch`` replaces transformers' RMS norms by ``torch.nn.RMSNorm``, one kernel. --steps
are timed after two others, or once a plan is chosen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import peft
import torch
from megatron import swap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import large_model, training_loop
from benchmarks.offloaders import OFFLOAD
from benchmarks.training_loop import CHECKPOINT, CHECKPOINTING, DEVICE, GIB, SETTINGS, loss_of, settle, timed

ADAPTERS = {
    "all-linear": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "q-v": ["q_proj", "v_proj"],
}
"""Linear layers that get an adapter: all of them, or those that peft takes for Llama and Qwen3 by itself."""
LEARNING_RATE = 1e-4
GIVEN = ("shape", "tokens", "chunk", "activations", "host_gib", "attention", "norms", "adapters", "rank")


def parser() -> argparse.ArgumentParser:
    return training_loop.new_parser(__doc__, {
        "shape": tuple(large_model.SHAPES), "layers": int, "device-layers": int, "tokens": 8192, "chunk": 2048,
        "attention": ("default", "cudnn"), "norms": ("transformers", "torch"), "adapters": tuple(ADAPTERS), "rank": 16,
        "host-gib": float, "steps": 4, "activations": CHECKPOINTING,
    })  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train, and return the row."""
    start = time.perf_counter()
    chosen = options.activations
    is_budget = "." in chosen
    """``60.0``; ``60`` is a layer."""
    if chosen in (CHECKPOINTING, OFFLOAD) and options.host_gib is not None:
        raise SystemExit(f"--host-gib is for activations that are swapped, and --activations {chosen} swaps none")
    model, host_layers = large_model.build(
        options.shape, options.layers, options.device_layers, options.norms == "torch"
    )
    if not is_budget:
        model.gradient_checkpointing_enable(CHECKPOINT, offload=chosen == OFFLOAD)
    config = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=ADAPTERS[options.adapters])
    torch.manual_seed(2)
    trained = peft.get_peft_model(model, config, autocast_adapter_dtype=False).train()
    with ExitStack() as stack:
        if options.attention == "cudnn":
            stack.enter_context(sdpa_kernel([SDPBackend.CUDNN_ATTENTION]))  # around backward, too: it recomputes
        weights = activations = None
        if host_layers:
            weights = stack.enter_context(swap.weights(model.model, host_layers, training=True))
        large_model.fill(model)
        tokens = torch.randint(model.config.vocab_size, (1, options.tokens), device=DEVICE)
        if chosen not in (CHECKPOINTING, OFFLOAD):
            what: dict[str, Any] = {"memory_gib": float(chosen)} if is_budget else {"layers": chosen}
            host = {} if options.host_gib is None else {"host_gib": options.host_gib}
            activations = stack.enter_context(swap.activations(model.model, **what, **(SETTINGS | host)))
        adapters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapters, LEARNING_RATE, fused=DEVICE == "cuda")

        def step() -> torch.Tensor:
            hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
            loss = loss_of(model.lm_head, hidden, tokens, options.chunk) / options.tokens
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        setup_s = time.perf_counter() - start
        losses = [step().item() for _ in range(2)]
        settle(step, activations, len(losses))
        ms = timed(step, options.steps)
        row: dict[str, Any] = {name: getattr(options, name) for name in GIVEN}
        row |= large_model.layers_of(model, host_layers)
        row |= {"tokens_per_s": round(1e3 * options.tokens / ms, 1), "ms": round(ms, 1), **training_loop.peaks()}
        row |= {"losses": losses, "setup_s": round(setup_s, 1)}
        row["pinned_gib"] = round(weights.stats.host_bytes / GIB, 3) if weights is not None else 0.0
        return row | training_loop.plan_of(activations)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the row."""
    training_loop.print_row(measure, parser().parse_args(arguments))


if __name__ == "__main__":
    main()
