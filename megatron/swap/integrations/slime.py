"""slime: a hook that it calls before each training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from megatron.swap.integrations.two_offloaders import refuse_two_offloaders
from megatron.swap.run.install import install
from megatron.swap.run.run import Run


def before_train_step(**settings: Any) -> Callable[[Any, int, int, Sequence[nn.Module], Any, Any], None]:
    """Return a function for ``--custom-megatron-before-train-step-hook-path``: assign it to a name of your module.

    ``settings``: the arguments of ``swap.install`` but the model and the optimizer.
    """
    # slime has no hook behind a step, and generates between two steps. So its optimizer's step ends a step.
    swapped: list[Run] = []

    def hook(
        args: Any, rollout_id: int, step_id: int, model: Sequence[nn.Module], optimizer: Any, scheduler: Any
    ) -> None:
        """Install swapping before the first step of this process, whose model never changes."""
        if not swapped:
            refuse_two_offloaders(settings, "--reset-optimizer-states", args.reset_optimizer_states)
            swapped.append(install(model, optimizer, **settings))

    return hook
