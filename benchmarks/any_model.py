"""A Qwen3-shaped model of transformers: nothing, gradient checkpointing, and budgets between the memory of both.

    python -m benchmarks.any_model --layers 16 --tokens 8192

Each method runs in a process of its own, and prints a line of JSON: the median step of forward and backward, the most
memory that the allocator reserved in a step after the planner has chosen, and the planner's prediction. The loss is
computed in chunks of 4,096 tokens. Budgets lie at fractions of the distance from checkpointing to nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from megatron import swap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

FRACTIONS = (0.0, 0.1, 0.25, 0.5)
"""Budgets above the memory of checkpointing, as fractions of the distance to that of nothing."""
CHUNK = 4096
NOTHING, CHECKPOINTING = "nothing", "checkpointing"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 2**30


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--hidden-size", type=int, default=4096, help="other sizes follow, as in Qwen3-8B")
    options.add_argument("--vocab-size", type=int, default=151936)
    options.add_argument("--steps", type=int, default=22, help="13 of them are the planner's")
    options.add_argument("--method", help=f"{NOTHING}, {CHECKPOINTING}, or a budget in GiB; default: all of them")
    return options


def model_of(options: argparse.Namespace) -> Any:
    heads = max(4, options.hidden_size // 128)
    config = transformers.Qwen3Config(
        num_hidden_layers=options.layers, hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size,
        num_attention_heads=heads, num_key_value_heads=heads // 4, head_dim=options.hidden_size // heads,
        vocab_size=options.vocab_size, max_position_embeddings=options.tokens, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def loss_of(head: torch.nn.Module, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all chunks, whose logits are computed again in backward."""

    def part(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(states).float(), labels, reduction="sum")

    pairs = zip(hidden[0].split(CHUNK), tokens[0].split(CHUNK), strict=True)
    return torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in pairs]).sum()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run one method and return its row."""
    model, swapped, method = model_of(options), None, options.method
    if method == CHECKPOINTING:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif method != NOTHING:
        smallest = {} if DEVICE == "cuda" else {"min_mib": 0.0, "host_gib": 0.1}
        swapped = swap.activations(model.model, memory_gib=float(method), **smallest)  # type: ignore[arg-type]
    tokens = torch.randint(options.vocab_size, (1, options.tokens), device=DEVICE)
    times, losses, reserved = [], [], 0
    for _ in range(options.steps):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = loss_of(model.lm_head, model.model(input_ids=tokens, use_cache=False).last_hidden_state, tokens)
        loss.backward()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            reserved = torch.cuda.memory_reserved()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(loss.item())
        model.zero_grad(set_to_none=False)
        if isinstance(swapped, swap.PlannedActivations):
            swapped.step()
    row: dict[str, Any] = {"method": method, "layers": options.layers, "tokens": options.tokens, "losses": losses[:2]}
    last = sorted(times[-7:])
    row |= {"ms": round(last[len(last) // 2], 1), "reserved_gib": round(reserved / GIB, 3)}
    if isinstance(swapped, swap.PlannedActivations):
        stats = swapped.stats()
        row |= {name: getattr(stats, name) for name in ("stage", "predicted_gib", "predicted_ms", "peak_gib")}
        print(swapped.plan(), file=sys.stderr)
        swapped.close()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the method that is given, or all of them, each in a process of its own."""
    options = parser().parse_args(arguments)
    if options.method is not None:
        print(json.dumps(measure(options)), flush=True)
        return
    own = list(sys.argv[1:] if arguments is None else arguments)

    def run(method: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.any_model", *own, "--method", method]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        print(lines[-1] if lines else json.dumps({"method": method, "rc": done.returncode}), flush=True)
        return json.loads(lines[-1]) if lines else {}

    nothing, least = run(NOTHING), run(CHECKPOINTING)
    if nothing and least:
        distance = nothing["reserved_gib"] - least["reserved_gib"]
        for fraction in FRACTIONS:
            run(f"{least['reserved_gib'] + fraction * distance:.3f}")


if __name__ == "__main__":
    main()
