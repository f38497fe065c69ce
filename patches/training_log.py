"""Report every iteration with its losses, next to Megatron's own log line.

Megatron has no hook there: ``train_step`` passes an iteration's losses to ``training_log``, which keeps only sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from megatron.swap.patches.registry import Patch


class OnIteration(Protocol):
    """Called after Megatron has logged. ``losses`` is empty on all pipeline stages but the last.

    Args:
        is_logged: Megatron printed its line.
        writer: Megatron's TensorBoard writer, or ``None``.
        averages_next: the next line's loss and time are means over the iterations of this line too. Megatron prints the
            first iteration of a process beside every ``--log-interval``-th, and does not clear its sums then.
    """

    def __call__(
        self, iteration: int, losses: dict[str, Tensor], grad_norm: Any, is_logged: bool, writer: Any,
        averages_next: bool = False,
    ) -> None: ...  # fmt: skip


def training_log_patch(on_iteration: OnIteration) -> Patch:
    """Make the patch. ``on_iteration`` is called for every iteration."""

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def training_log(
            loss_dict: dict[str, Tensor], total_loss_dict: dict[str, Any], learning_rate: float | None, iteration: int,
            loss_scale: float, report_memory_flag: bool, skipped_iter: int, grad_norm: Any, *arguments: Any,
            is_first_iteration: bool = False, **options: Any,
        ) -> Any:  # fmt: skip
            from megatron.training import get_args, get_tensorboard_writer

            # Upstream adds these tensors to running sums and never writes to them, and may change its dictionary.
            losses = dict(loss_dict)
            result = original(
                loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter,
                grad_norm, *arguments, is_first_iteration=is_first_iteration, **options,
            )  # fmt: skip
            is_end = iteration % get_args().log_interval == 0
            averages_next = is_first_iteration and is_end
            writer = get_tensorboard_writer()
            on_iteration(iteration, losses, grad_norm, is_end or is_first_iteration, writer, averages_next)
            return result

        return training_log

    return Patch(
        module="megatron.training.training",
        attribute="training_log",
        build=build,
        reason="no hook receives an iteration's number, losses and gradient norm",
        sources={
            "megatron-core 0.18.2": "ff65518b92bd54ed267946825615e8d9bceb5b5f4357eca7e16705a0d204fa2a",
            "megatron-core 0.19.0": "5e34a182d566e325edb4e0f342819036db16801b5d9972cd294f1b8406f51f5d",
        },
    )
