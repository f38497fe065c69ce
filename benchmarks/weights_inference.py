"""Inference of a model of 32 or 70 billion weights with weights in host memory: ``swap.weights`` beside accelerate.

    python -m benchmarks.weights_inference --shape 32b --device-layers 0 --method swap
    python -m benchmarks.weights_inference --shape 32b --device-layers 0 --method accelerate

prints a line of JSON: tokens per second of the prompt (a forward that fills the cache of keys and values), tokens per
second of greedy decoding after it, the milliseconds of both, the most device memory allocated and reserved, the host
memory that ``swap.weights`` pins, and the tokens that were decoded first, which do not depend on the method.
The weights of --device-layers stay on the device. --steps prompts are timed, after another one, and --decode tokens.
``accelerate`` is its ``cpu_offload`` of the same layers, from pageable memory; for ``accelerate-pinned`` their weights
are pinned before. With ``--method device`` all layers are on the device. Random bf16 weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from megatron import swap

from benchmarks.large_model import build, fill, layers_of
from benchmarks.training_loop import DEVICE, GIB, new_parser, peaks, print_row, timed

METHODS = SWAP, ACCELERATE, ACCELERATE_PINNED, ON_DEVICE = ("swap", "accelerate", "accelerate-pinned", "device")


def parser() -> argparse.ArgumentParser:
    return new_parser(__doc__, {
        "shape": ("32b", "70b", "tiny"), "layers": int, "device-layers": 0, "batch": 8, "tokens": 2048, "decode": 4,
        "steps": 2, "method": METHODS, "attention": ("sdpa", "eager"),
    })  # fmt: skip


@torch.no_grad()
def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run prompts and decode, and return the row."""
    start = time.perf_counter()
    num_on_device = None if options.method == ON_DEVICE else options.device_layers
    model, host_layers = build(options.shape, options.layers, num_on_device, attention=options.attention)
    model.eval()
    with ExitStack() as stack:
        swapped = stack.enter_context(swap.weights(model, host_layers)) if options.method == SWAP else None
        if options.method == ACCELERATE_PINNED:
            for parameter in (parameter for layer in host_layers for parameter in layer.parameters()):
                parameter.data = torch.empty_like(parameter, pin_memory=True)
        fill(model)
        prompt = torch.randint(model.config.vocab_size, (options.batch, options.tokens), device=DEVICE)
        if options.method in (ACCELERATE, ACCELERATE_PINNED):
            for layer in host_layers:
                accelerate.cpu_offload(layer, execution_device=torch.device(DEVICE))
        setup_s = time.perf_counter() - start
        made: list[torch.Tensor] = []
        cache: Any = None

        def run(tokens: torch.Tensor) -> None:
            nonlocal cache
            outputs = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = outputs.past_key_values
            made.append(outputs.logits[:, -1:].argmax(-1))

        def prefill() -> None:
            nonlocal cache
            cache = None
            made.clear()
            run(prompt)

        prefill()
        prefill_ms = timed(prefill, options.steps)
        run(made[-1])
        decode_ms = timed(lambda: run(made[-1]), options.decode)
        given = ("method", "attention", "shape", "batch", "tokens")
        row: dict[str, Any] = {name: getattr(options, name) for name in given}
        row |= layers_of(model, host_layers)
        row |= {"prefill_tokens_per_s": round(1e3 * options.batch * options.tokens / prefill_ms, 1)}
        row |= {"prefill_ms": round(prefill_ms, 1), "decode_tokens_per_s": round(1e3 * options.batch / decode_ms, 2)}
        row |= {"decode_ms": round(decode_ms, 1), **peaks(), "setup_s": round(setup_s, 1)}
        row["pinned_gib"] = round(swapped.stats.host_bytes / GIB, 3) if swapped is not None else 0.0
        row["decoded"] = torch.cat(made, 1)[0].tolist()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the row."""
    print_row(measure, parser().parse_args(arguments))


if __name__ == "__main__":
    main()
