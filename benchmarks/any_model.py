"""A Qwen3-shaped model of transformers: nothing, gradient checkpointing, and budgets between the memory of both.

    python -m benchmarks.any_model --layers 16 --tokens 8192
    python -m benchmarks.any_model --layers 16 --tokens 8192 --method trl
    python -m benchmarks.any_model --layers 16 --tokens 8192 --save FOLDER

Each method runs in a process of its own, and prints a line of JSON: the time of a step in a row of steps, and of one
from an idle GPU to an idle GPU; the memory that the allocator has reserved at its end; the planner's prediction, or
``"out of memory": true``. Budgets lie at fractions of the distance from checkpointing to nothing. --method runs one
alone: nothing, checkpointing, a budget in GiB, or one of ``offloaders``. --save writes plan and profile of each budget.
Without a mask transformers waits for the GPU at the start of each forward; with --prepared-mask it does not.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron import swap

from benchmarks import training_loop as loop
from benchmarks.offloaders import METHODS, Offloader

FRACTIONS = (0.0, 0.1, 0.25, 0.5)
"""Budgets above the memory of checkpointing, as fractions of the distance to that of nothing."""
WARM_UP = 4


def parser() -> argparse.ArgumentParser:
    sizes = {"layers": 16, "tokens": 8192, **loop.QWEN3_8B, "steps": 7}
    return loop.new_parser(__doc__, {**sizes, "save": str, "prepared-mask": False, "method": str})


def training_step(options: argparse.Namespace, method: str) -> tuple[Callable[[], torch.Tensor], Any]:
    """Return a function that trains a step with ``method`` and returns its loss, and what ``swap.activations`` gave."""
    model, swapped = loop.model_of(options, torch.bfloat16).train(), None
    offloader = Offloader(method, model)
    if method == loop.CHECKPOINTING:
        model.gradient_checkpointing_enable(loop.CHECKPOINT)
    elif method not in (loop.NOTHING, *METHODS):
        files: dict[str, Any] = {}
        if options.save is not None:
            Path(options.save).mkdir(parents=True, exist_ok=True)
            files = {f"save_{kind}": f"{options.save}/{kind}-{method}.json" for kind in ("plan", "profile")}
        swapped = swap.activations(model.model, memory_gib=float(method), **loop.SETTINGS, **files)
    tokens = torch.randint(options.vocab_size, (1, options.tokens), device=loop.DEVICE)
    mask: dict[str, Any] = {"attention_mask": {"full_attention": None}} if options.prepared_mask else {}

    def step() -> torch.Tensor:
        with offloader.step:
            with offloader.forward:
                hidden = model.model(input_ids=tokens, use_cache=False, **mask).last_hidden_state
            loss = loop.loss_of(model.lm_head, hidden, tokens)
            loss.backward()
        model.zero_grad(set_to_none=False)
        if isinstance(swapped, swap.Run):
            swapped.step()
        return loss.detach()

    return step, swapped


def measure(options: argparse.Namespace) -> dict[str, Any]:
    step, swapped = training_step(options, options.method)
    losses = [step().item() for _ in range(WARM_UP)]
    loop.settle(step, swapped, WARM_UP)
    alone_ms = statistics.median_high([loop.timed(step, 1) for _ in range(options.steps)])
    row: dict[str, Any] = {name: getattr(options, name) for name in ("method", "layers", "tokens")}
    row |= {"losses": losses[:2], "ms": round(loop.timed(step, options.steps), 1), "ms_alone": round(alone_ms, 1)}
    row["reserved_gib"] = round(torch.cuda.memory_reserved() / loop.GIB, 3) if loop.DEVICE == "cuda" else 0.0
    if isinstance(swapped, swap.Run) and swapped.stats().budget_gib is not None:
        row |= loop.plan_of(swapped)
        print(swapped.plan(), file=sys.stderr)
        swapped.close()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.method is not None:
        loop.print_row(measure, options)
        return
    own = list(sys.argv[1:] if arguments is None else arguments)

    def run(method: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.any_model", *own, "--method", method]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        print(lines[-1] if lines else json.dumps({"method": method, "rc": done.returncode}), flush=True)
        return json.loads(lines[-1]) if lines else {}

    nothing, least = run(loop.NOTHING), run(loop.CHECKPOINTING)
    if "reserved_gib" in nothing and "reserved_gib" in least:
        distance = nothing["reserved_gib"] - least["reserved_gib"]
        for fraction in FRACTIONS:
            run(f"{least['reserved_gib'] + fraction * distance:.3f}")


if __name__ == "__main__":
    main()
