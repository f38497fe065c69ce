"""What benchmarks of transformers models share: options, a model, a loss in chunks, times, memory, and their row."""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from megatron import swap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron.swap.common.plan import Infeasible

CHUNK = 4096  # Tokens whose logits exist at once
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 2**30
SETTINGS: dict[str, Any] = {} if DEVICE == "cuda" else {"min_mib": 0.0, "host_gib": 0.1}
"""Arguments of ``swap.activations``, so that it also swaps what a tiny model saves on the CPU."""
MOST_STEPS = 38  # By then a planner has chosen
NOTHING, CHECKPOINTING = "nothing", "checkpointing"  # Methods of every program: no saving, and transformers' own
CHECKPOINT = {"use_reentrant": False}
QWEN3_8B = {"hidden-size": 4096, "vocab-size": 151936}  # Options of `model_of`. Other sizes follow, as in Qwen3-8B.


def new_parser(text: str | None, options: dict[str, Any]) -> argparse.ArgumentParser:
    """Return a parser of ``--NAME VALUE`` options. ``options``: a default for each, or a type without a default."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in options.items():
        if isinstance(given, bool):
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(given, type):
            parser.add_argument(f"--{name}", type=given)
        else:
            parser.add_argument(f"--{name}", type=type(given), default=given)
    return parser


def model_of(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    heads = max(4, options.hidden_size // 128)
    config = transformers.Qwen3Config(
        num_hidden_layers=options.layers, hidden_size=options.hidden_size, intermediate_size=3 * options.hidden_size,
        num_attention_heads=heads, num_key_value_heads=heads // 4, head_dim=options.hidden_size // heads,
        vocab_size=options.vocab_size, max_position_embeddings=options.tokens, dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def loss_of(head: torch.nn.Module, hidden: torch.Tensor, tokens: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """Return the sum of the losses of all chunks, whose logits are computed again in backward."""

    def part(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(states).float(), labels, reduction="sum")

    pairs = zip(hidden[0].split(chunk), tokens[0].split(chunk), strict=True)
    return torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in pairs]).sum()


def timed(step: Callable[[], object], number: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(number):
        step()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / number


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peaks() -> dict[str, Any]:
    on_gpu = DEVICE == "cuda"
    allocated, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (0, 0)
    return {"allocated_gib": round(allocated / GIB, 3), "peak_reserved_gib": round(reserved / GIB, 3)}


def settle(step: Callable[[], object], swapped: object, num_steps: int) -> None:
    if isinstance(swapped, swap.Run) and swapped.stats().budget_gib is not None:
        while swapped.stats().stage != "stable" and num_steps < MOST_STEPS:
            step()
            num_steps += 1


def plan_of(swapped: object) -> dict[str, Any]:
    if not isinstance(swapped, swap.Run) or swapped.stats().budget_gib is None:
        return {}
    stats = swapped.stats()
    return {name: getattr(stats, name) for name in ("stage", "predicted_gib", "predicted_ms", "peak_gib")}


def print_row(measure: Callable[[argparse.Namespace], dict[str, Any]], options: argparse.Namespace) -> None:
    try:
        row = measure(options)
    except torch.OutOfMemoryError:
        row = {**vars(options), "out of memory": True, **peaks()}
    except Infeasible as error:
        row = {**vars(options), "infeasible": str(error), **peaks()}
    print(json.dumps(row), flush=True)
