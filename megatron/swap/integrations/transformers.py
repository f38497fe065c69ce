"""Callback of transformers' ``Trainer``, and of trainers made from it (TRL's)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from megatron.swap.common.plan import Infeasible
from megatron.swap.common.types import UsageError
from megatron.swap.run.run import Run
from megatron.swap.run.train import activations

REFUSED = {
    "n_gpu": "nn.DataParallel copies the layers. Start with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU.",
    "torch_compile": "compiled layers hide what they save. Leave it out.",
    "deepspeed": "ZeRO-3 frees weights between uses. Leave it out: torchrun alone trains data parallel.",
    "fsdp": "sharded weights are freed between uses. Leave it out: torchrun alone trains data parallel.",
}


class SwapCallback(TrainerCallback):
    """Swaps tensors that the model's layers save while the trainer trains::

        Trainer(model, args, train_dataset=data, callbacks=[SwapCallback(memory_gib=60)]).train()

    Args:
        settings: the arguments of ``swap.activations`` but the model: ``memory_gib``, or ``layers``, and more.
    """

    def __init__(self, **settings: Any) -> None:
        self.swapped: Run | None = None  # of ``swap.activations``; None before training
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Put the boundaries around the layers. Raises ``UsageError`` for ``REFUSED``, and as ``swap.activations``."""
        for name, remedy in REFUSED.items():
            if (given := getattr(args, name, None)) and (name != "n_gpu" or given > 1):
                raise UsageError(f"SwapCallback with {name}={given!r} of TrainingArguments: {remedy}")
        self._close()  # a training before this one may have failed
        self.swapped = activations(options["model"], **self._settings)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that a step has ended. Raises ``Infeasible`` if no plan fits the budget, and restores the model."""
        if self.swapped is not None:
            try:
                self.swapped.step()
            except Infeasible:
                self._close()  # the trainer ends with this error, and does not call on_train_end
                raise

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the model. ``swapped.stats()`` keeps its last figures."""
        self._close()

    def _close(self) -> None:
        if self.swapped is not None:
            self.swapped.close()
