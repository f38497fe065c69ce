"""A Qwen3-shaped model of transformers: nothing, gradient checkpointing, and budgets between the memory of both.

    python -m benchmarks.any_model --layers 16 --tokens 8192

Each method runs in a process of its own, and prints a line of JSON: the time of a step of forward and backward, the
memory that the allocator has reserved at its end, and the planner's prediction. Steps are timed in a row, as a training
loop runs them, which leaves the host time to run ahead; and one by one, each from an idle GPU to an idle GPU. The loss
is computed in chunks of 4,096 tokens. Budgets lie at fractions of the distance from checkpointing to nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
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
WARM_UP = 4
MOST_STEPS = 30
"""By then a planner has chosen."""


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--hidden-size", type=int, default=4096, help="other sizes follow, as in Qwen3-8B")
    options.add_argument("--vocab-size", type=int, default=151936)
    options.add_argument("--steps", type=int, default=7, help="to time, once the planner has chosen")
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


def timed(step: Callable[[], object], number: int) -> float:
    """Return the milliseconds that a step takes, of ``number`` steps in a row."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / number


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run one method and return its row."""
    model, swapped, method = model_of(options), None, options.method
    if method == CHECKPOINTING:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif method != NOTHING:
        smallest = {} if DEVICE == "cuda" else {"min_mib": 0.0, "host_gib": 0.1}
        swapped = swap.activations(model.model, memory_gib=float(method), **smallest)  # type: ignore[arg-type]
    tokens = torch.randint(options.vocab_size, (1, options.tokens), device=DEVICE)

    def step() -> torch.Tensor:
        loss = loss_of(model.lm_head, model.model(input_ids=tokens, use_cache=False).last_hidden_state, tokens)
        loss.backward()
        model.zero_grad(set_to_none=False)
        if isinstance(swapped, swap.PlannedActivations):
            swapped.step()
        return loss.detach()

    losses = [step().item() for _ in range(WARM_UP)]
    if isinstance(swapped, swap.PlannedActivations):
        num_steps = WARM_UP
        while swapped.stats().stage != "stable" and num_steps < MOST_STEPS:
            step()
            num_steps += 1
    alone = sorted(timed(step, 1) for _ in range(options.steps))
    row: dict[str, Any] = {"method": method, "layers": options.layers, "tokens": options.tokens, "losses": losses[:2]}
    row |= {"ms": round(timed(step, options.steps), 1), "ms_alone": round(alone[len(alone) // 2], 1)}
    row["reserved_gib"] = round(torch.cuda.memory_reserved() / GIB, 3) if DEVICE == "cuda" else 0.0
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
