"""transformers' ``Trainer`` on a Qwen3-8B-shaped model with a budget (``SwapCallback``), beside gradient checkpointing.

    python -m benchmarks.trainer --tokens 8192 --method nothing
    python -m benchmarks.trainer --tokens 8192 --method checkpointing
    python -m benchmarks.trainer --tokens 8192 --method 130

prints a line of JSON: tokens per second and milliseconds over the last --steps, once a plan was stable in three; the
most device memory allocated and reserved; all losses; for a budget in GiB also what the planner predicted. A method
that runs out of memory prints ``"out of memory": true``, a budget for which there is no plan ``"infeasible"`` and why.
fp32 weights, bf16 autocast, fused AdamW, random tokens, one sequence a step; with a budget, ``autocast_cache=False``.
The Trainer's own loss needs the logits of all tokens at once.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from benchmarks import training_loop as loop
from megatron.swap.integrations.transformers import SwapCallback

WARM_UP = 3  # Steps that are not timed: the first, and the first ones under the chosen plan


class Recorder(transformers.Trainer):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.losses: list[torch.Tensor] = []

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)
        self.losses.append(loss.detach())
        return loss


class Clock(transformers.TrainerCallback):
    """Times the last steps, once ``swap``'s plan was stable in ``WARM_UP`` of them, and then ends the training."""

    def __init__(self, num_timed: int, swap: SwapCallback | None) -> None:
        self.ms = 0.0
        self._num_timed, self._swap = num_timed, swap
        self._num_steps = self._num_ready = 0
        self._start = 0.0
        self._started_at: int | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._num_steps += 1
        stage = loop.plan_of(self._swap.swapped if self._swap is not None else None).get("stage", "stable")
        self._num_ready += stage == "stable" or self._num_steps >= loop.MOST_STEPS
        if self._started_at is None and self._num_ready == WARM_UP:
            loop.synchronize()
            self._start, self._started_at = time.perf_counter(), self._num_steps
        elif self._started_at is not None and self._num_steps - self._started_at == self._num_timed:
            loop.synchronize()
            self.ms = 1e3 * (time.perf_counter() - self._start) / self._num_timed
            control.should_training_stop = True


def measure(options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    model, method = loop.model_of(options, torch.float32), options.method
    model.config.use_cache = False
    swap = None
    if method not in (loop.NOTHING, loop.CHECKPOINTING):
        swap = SwapCallback(memory_gib=float(method), autocast_cache=False, **loop.SETTINGS)
    clock = Clock(options.steps, swap)
    num_steps = loop.MOST_STEPS + WARM_UP + options.steps
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(options.vocab_size, (num_steps, options.tokens), generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=num_steps, per_device_train_batch_size=1, bf16=True,
            use_cpu=loop.DEVICE == "cpu", optim="adamw_torch_fused", learning_rate=1e-5,
            gradient_checkpointing=method == loop.CHECKPOINTING,
            gradient_checkpointing_kwargs=loop.CHECKPOINT, logging_strategy="no", save_strategy="no", report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        data: Any = [{"input_ids": sequence, "labels": sequence} for sequence in tokens]
        callbacks = [clock] if swap is None else [swap, clock]
        trainer = Recorder(model=model, args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(transformers.PrinterCallback)
        setup_s = time.perf_counter() - start
        trainer.train()
    row: dict[str, Any] = {"method": method, "layers": options.layers, "tokens": options.tokens}
    row |= {"tokens_per_s": round(1e3 * options.tokens / clock.ms, 1), "ms": round(clock.ms, 1), **loop.peaks()}
    row |= {"losses": [round(loss.item(), 4) for loss in trainer.losses], "setup_s": round(setup_s, 1)}
    return row | loop.plan_of(swap.swapped if swap is not None else None)


def main(arguments: Sequence[str] | None = None) -> None:
    options = {"layers": 36, **loop.QWEN3_8B, "tokens": 8192, "steps": 5, "method": loop.CHECKPOINTING}
    loop.print_row(measure, loop.new_parser(__doc__, options).parse_args(arguments))


if __name__ == "__main__":
    main()
