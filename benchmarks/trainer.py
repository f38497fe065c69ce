"""transformers' ``Trainer`` on a Qwen3-8B-shaped model with a budget (``SwapCallback``), beside gradient checkpointing.

    python -m benchmarks.trainer --tokens 8192 --method nothing
    python -m benchmarks.trainer --tokens 8192 --method checkpointing
    python -m benchmarks.trainer --tokens 8192 --method 130

prints a line of JSON: tokens per second and milliseconds over the last steps, once a plan was stable in three; the
most device memory allocated and reserved; all losses; for a budget in GiB also what the planner predicted. A method
that runs out of memory prints ``"out of memory": true``, a budget for which there is no plan ``"infeasible"`` and why.
fp32 weights, bf16 autocast, fused AdamW, random tokens, one sequence a step; with a budget, ``autocast_cache=False``.
The Trainer's own loss needs the logits of all tokens at once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks.offloaders import CHECKPOINT
from benchmarks.training_loop import DEVICE, MOST_STEPS, SETTINGS, model_of, peaks, plan_of, print_row, synchronize
from megatron.swap.integrations.transformers import SwapCallback
from megatron.swap.run.planned_activations import PlannedActivations

NOTHING, CHECKPOINTING = "nothing", "checkpointing"
WARM_UP = 3
"""Steps that are not timed: the first, and the first ones under the chosen plan."""


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=36)
    options.add_argument("--hidden-size", type=int, default=4096, help="other sizes follow, as in Qwen3-8B")
    options.add_argument("--vocab-size", type=int, default=151936)
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument("--steps", type=int, default=5, help="to time")
    options.add_argument("--method", default=CHECKPOINTING, help=f"{NOTHING}, {CHECKPOINTING}, or a budget in GiB")
    return options


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens, each the same in every run."""

    def __init__(self, number: int, tokens: int, vocab_size: int) -> None:
        self._number, self._tokens, self._vocab_size = number, tokens, vocab_size

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(self._vocab_size, (self._tokens,), generator=draw)
        return {"input_ids": tokens, "labels": tokens}


class Recorder(transformers.Trainer):
    """A Trainer that keeps the loss of every step, without waiting for it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.losses: list[torch.Tensor] = []

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        self.losses.append(loss.detach())
        return loss


class Clock(transformers.TrainerCallback):
    """Times the last steps, once ``swap``'s plan was stable in ``WARM_UP`` of them, and then ends the training.

    Attributes:
        ms: of a step.
    """

    def __init__(self, num_timed: int, swap: SwapCallback | None) -> None:
        self.ms = 0.0
        self._num_timed, self._swap = num_timed, swap
        self._num_steps = self._num_ready = 0
        self._start = 0.0
        self._started_at: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._num_steps += 1
        swapped = self._swap.swapped if self._swap is not None else None
        is_ready = not isinstance(swapped, PlannedActivations) or swapped.stats().stage == "stable"
        self._num_ready += is_ready or self._num_steps >= MOST_STEPS
        if self._started_at is None and self._num_ready == WARM_UP:
            synchronize()
            self._start, self._started_at = time.perf_counter(), self._num_steps
        elif self._started_at is not None and self._num_steps - self._started_at == self._num_timed:
            synchronize()
            self.ms = 1e3 * (time.perf_counter() - self._start) / self._num_timed
            control.should_training_stop = True


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train with one method and return its row."""
    start = time.perf_counter()
    model, method = model_of(options, torch.float32), options.method
    model.config.use_cache = False
    swap = None
    if method not in (NOTHING, CHECKPOINTING):
        swap = SwapCallback(memory_gib=float(method), autocast_cache=False, **SETTINGS)
    clock = Clock(options.steps, swap)
    num_steps = MOST_STEPS + WARM_UP + options.steps
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=num_steps, per_device_train_batch_size=1, bf16=True, use_cpu=DEVICE == "cpu",
            optim="adamw_torch_fused", learning_rate=1e-5, gradient_checkpointing=method == CHECKPOINTING,
            gradient_checkpointing_kwargs=CHECKPOINT, logging_strategy="no", save_strategy="no", report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        data = RandomTokens(num_steps, options.tokens, options.vocab_size)
        callbacks = [clock] if swap is None else [swap, clock]
        trainer = Recorder(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        setup_s = time.perf_counter() - start
        trainer.train()
    row: dict[str, Any] = {"method": method, "layers": options.layers, "tokens": options.tokens}
    row |= {"tokens_per_s": round(1e3 * options.tokens / clock.ms, 1), "ms": round(clock.ms, 1), **peaks()}
    row |= {"losses": [round(loss.item(), 4) for loss in trainer.losses], "setup_s": round(setup_s, 1)}
    return row | plan_of(swap.swapped if swap is not None else None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the row."""
    print_row(measure, parser().parse_args(arguments))


if __name__ == "__main__":
    main()
