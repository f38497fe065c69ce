"""Megatron-Bridge: a callback of its trainer."""

from __future__ import annotations

from typing import Any

from megatron.bridge.training.callbacks import Callback, CallbackContext

from megatron.swap.integrations.two_offloaders import refuse_two_offloaders
from megatron.swap.run.install import install
from megatron.swap.run.run import Run


class SwapCallback(Callback):
    """Swaps from the first training step to the last; for ``callbacks=[…]`` of Bridge's ``pretrain`` and ``finetune``.

    ``settings``: the arguments of ``swap.install`` but the model and the optimizer.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        # The result of ``swap.install``, whose figures remain after training. None before.
        self.swapped: Run | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Install swapping. Raises as ``swap.install``, and if Bridge reads offloaded optimizer state."""
        config = context.state.cfg  # by now the model is wrapped, the optimizer is built and the checkpoint is loaded
        refuse_two_offloaders(self._settings, "logger.log_params_norm", config.logger.log_params_norm)
        refuse_two_offloaders(self._settings, "checkpoint.async_save", config.checkpoint.async_save)
        self.swapped = install(context.model, context.optimizer, **self._settings)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """End the step, also one whose optimizer skipped its update."""
        if self.swapped is not None:
            self.swapped.step()

    def on_train_end(self, context: CallbackContext) -> None:
        """Restore the model. Not called if training fails."""
        if self.swapped is not None:
            self.swapped.close()
