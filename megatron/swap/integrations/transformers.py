"""Callback of transformers' ``Trainer``, and of trainers made from it (TRL's)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from megatron.swap.nn.module_activations import activations
from megatron.swap.nn.planned_activations import PlannedActivations
from megatron.swap.nn.swapped_activations import SwappedActivations


class SwapCallback(TrainerCallback):
    """Swaps what the model's layers save while the trainer trains::

        Trainer(model, args, train_dataset=data, callbacks=[SwapCallback(memory_gib=60)]).train()

    Args:
        settings: the arguments of ``swap.activations`` but the model: ``memory_gib``, or ``layers``, and more.

    Attributes:
        swapped: what ``swap.activations`` returned; ``None`` before training.
    """

    def __init__(self, **settings: Any) -> None:
        self.swapped: SwappedActivations | None = None
        self._settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Put the boundaries around the layers.

        Raises:
            UsageError, HostMemoryError: as ``swap.activations`` raises them.
        """
        self._close()  # a training before this one may have failed
        self.swapped = activations(options["model"], **self._settings)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell that a step has ended.

        Raises:
            Infeasible: no plan fits the budget.
        """
        if isinstance(self.swapped, PlannedActivations):
            self.swapped.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the model. ``swapped.stats()`` keeps its last figures."""
        self._close()

    def _close(self) -> None:
        if self.swapped is not None:
            self.swapped.close()
