"""A Qwen3-shaped model of transformers: nothing, gradient checkpointing, and budgets between the memory of both.

    python -m benchmarks.any_model --layers 16 --tokens 8192
    python -m benchmarks.any_model --layers 16 --tokens 8192 --method trl
    python -m benchmarks.any_model --layers 16 --tokens 8192 --save FOLDER

Each method runs in a process of its own, and prints a line of JSON: the time of a step of forward and backward, the
memory that the allocator has reserved at its end, and the planner's prediction. Steps are timed in a row, as a training
loop runs them, which leaves the host time to run ahead; and one by one, each from an idle GPU to an idle GPU. The loss
is computed in chunks of 4,096 tokens. Budgets lie at fractions of the distance from checkpointing to nothing. Other
libraries' offloading is a method of its own (``offloaders``): ``--method offload``, ``trl``, ``torchtune``,
``trl+checkpointing`` or ``torchtune+checkpointing``. A method that runs out of memory prints ``"out of memory": true``.
With ``--save`` the plan and the profile of each budget are written to the folder. Without a mask transformers waits for
the GPU at the start of each forward (is a sequence packed?), so the host is never ahead. With ``--prepared-mask`` it
gets one as its ``generate`` makes it, and does not wait.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron import swap

from benchmarks.offloaders import CHECKPOINT, METHODS, Offloader
from benchmarks.training_loop import DEVICE, GIB, SETTINGS, loss_of, model_of, plan_of, print_row, settle, timed

FRACTIONS = (0.0, 0.1, 0.25, 0.5)
"""Budgets above the memory of checkpointing, as fractions of the distance to that of nothing."""
NOTHING, CHECKPOINTING = "nothing", "checkpointing"
WARM_UP = 4


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=16)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--hidden-size", type=int, default=4096, help="other sizes follow, as in Qwen3-8B")
    options.add_argument("--vocab-size", type=int, default=151936)
    options.add_argument("--save", help="folder for the plans and profiles of budgets")
    options.add_argument("--prepared-mask", action="store_true", help="keep transformers from waiting in forward")
    options.add_argument("--steps", type=int, default=7, help="to time, once the planner has chosen")
    options.add_argument(
        "--method",
        help=f"{NOTHING}, {CHECKPOINTING}, a budget in GiB, {', '.join(METHODS)}; default: the first two, and budgets",
    )
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run one method and return its row."""
    model, swapped, method = model_of(options, torch.bfloat16).train(), None, options.method
    offloader = Offloader(method, model)
    if method == CHECKPOINTING:
        model.gradient_checkpointing_enable(CHECKPOINT)
    elif method not in (NOTHING, *METHODS):
        files: dict[str, Any] = {} if options.save is None else _files(Path(options.save), method)
        swapped = swap.activations(model.model, memory_gib=float(method), **SETTINGS, **files)
    tokens = torch.randint(options.vocab_size, (1, options.tokens), device=DEVICE)
    mask: dict[str, Any] = {"attention_mask": {"full_attention": None}} if options.prepared_mask else {}

    def step() -> torch.Tensor:
        with offloader.step:
            with offloader.forward:
                hidden = model.model(input_ids=tokens, use_cache=False, **mask).last_hidden_state
            loss = loss_of(model.lm_head, hidden, tokens)
            loss.backward()
        model.zero_grad(set_to_none=False)
        if isinstance(swapped, swap.PlannedActivations):
            swapped.step()
        return loss.detach()

    losses = [step().item() for _ in range(WARM_UP)]
    settle(step, swapped, WARM_UP)
    alone = sorted(timed(step, 1) for _ in range(options.steps))
    row: dict[str, Any] = {"method": method, "layers": options.layers, "tokens": options.tokens, "losses": losses[:2]}
    row |= {"ms": round(timed(step, options.steps), 1), "ms_alone": round(alone[len(alone) // 2], 1)}
    row["reserved_gib"] = round(torch.cuda.memory_reserved() / GIB, 3) if DEVICE == "cuda" else 0.0
    if isinstance(swapped, swap.PlannedActivations):
        row |= plan_of(swapped)
        print(swapped.plan(), file=sys.stderr)
        swapped.close()
    return row


def _files(folder: Path, method: str) -> dict[str, str]:
    """Return the arguments of ``swap.activations`` that write plan and profile to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    return {f"save_{kind}": str(folder / f"{kind}-{method}.json") for kind in ("plan", "profile")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the method that is given, or all of them, each in a process of its own."""
    options = parser().parse_args(arguments)
    if options.method is not None:
        print_row(measure, options)
        return
    own = list(sys.argv[1:] if arguments is None else arguments)

    def run(method: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.any_model", *own, "--method", method]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        print(lines[-1] if lines else json.dumps({"method": method, "rc": done.returncode}), flush=True)
        return json.loads(lines[-1]) if lines else {}

    nothing, least = run(NOTHING), run(CHECKPOINTING)
    if "reserved_gib" in nothing and "reserved_gib" in least:
        distance = nothing["reserved_gib"] - least["reserved_gib"]
        for fraction in FRACTIONS:
            run(f"{least['reserved_gib'] + fraction * distance:.3f}")


if __name__ == "__main__":
    main()
