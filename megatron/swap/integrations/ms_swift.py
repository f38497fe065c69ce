"""ms-swift: a callback of its Megatron trainers."""

from __future__ import annotations

import functools
from typing import Any

from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map

from megatron.swap.integrations.two_offloaders import refuse_two_offloaders
from megatron.swap.run.install import install
from megatron.swap.run.run import Run


class SwapCallback(MegatronCallback):
    """Swaps from the first training step to the last. ms-swift makes it from ``--callbacks swap``, after ``register``.

    ``settings``: the arguments of ``swap.install`` but the model and the optimizer.
    """

    def __init__(self, trainer: Any, **settings: Any) -> None:
        super().__init__(trainer)
        self._settings = settings
        self.swapped: Run | None = None

    def on_train_begin(self) -> None:
        """Install swapping. Raises as ``swap.install``."""
        # Only arguments of reinforcement learning have this one. Reference and teacher models run without gradients and
        # are left alone.
        is_moved = getattr(self.args, "offload_optimizer", False)
        refuse_two_offloaders(self._settings, "--offload_optimizer", is_moved)
        refuse_two_offloaders(self._settings, "--async_save", self.args.async_save)
        self.swapped = install(self.trainer.wrapped_models, self.trainer.optimizer, **self._settings)

    def on_step_end(self) -> None:
        """End the step."""
        if self.swapped is not None:
            self.swapped.step()

    def on_train_end(self) -> None:
        """Restore the model. Not called if training fails."""
        if self.swapped is not None:
            self.swapped.close()


def register(**settings: Any) -> None:
    """Make ``--callbacks swap`` known to ms-swift. Call it in a file that ``--external_plugins`` names.

    ``settings``: the arguments of ``swap.install`` but the model and the optimizer.
    """
    megatron_callbacks_map["swap"] = functools.partial(SwapCallback, **settings)
