"""The loss of a run in chunks, and the lines about it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron.swap.common.plan import Model
from megatron.swap.common.settings import Settings
from megatron.swap.common.types import GIB, format_bytes
from megatron.swap.forecast.loss_chunks import choose_num_chunks, loss_bytes
from megatron.swap.megatron_lm.loss_chunks import chunk_loss

WORTH = 0.01  # fraction of the budget from which on the savings of --swap-loss-chunks are worth a line


class RunLoss:
    """Runs a loss in chunks if asked to. ``describe`` and ``has_sum`` are called in the first forward or later."""

    def __init__(self, settings: Settings, describe: Callable[[], Model], has_sum: Callable[[], bool]) -> None:
        self._settings = settings
        self._describe = describe
        self._has_sum = has_sum
        self._is_told = False
        self._chosen: int | None = None

    @property
    def num_chunks(self) -> int:
        """The number of chunks, which stays for the run from the first forward with gradients on."""
        asked = self._settings.loss_chunks
        if asked != "auto":
            return asked or 1
        chosen = self._chosen or choose_num_chunks(self._describe(), self._has_sum())
        # A model that exists may run without gradients before, when the length of its sequences is not known yet.
        if torch.is_grad_enabled():
            self._chosen = chosen
        return chosen

    def attach(self, chunk: nn.Module) -> Callable[[], None]:
        """Let ``chunk`` of the model run its loss in chunks, if the settings ask for it. Return an undo function."""
        if self._settings.loss_chunks is None:
            return lambda: None
        return chunk_loss(chunk, lambda: self.num_chunks)

    def step_ended(self, budget_gib: float | None) -> str | None:
        """Return a line once: the choice of ``auto``, or the flag's savings beside a planner's ``budget_gib``."""
        if self._is_told:
            return None
        self._is_told = True
        if self._settings.loss_chunks == "auto":
            peak_bytes = loss_bytes(self._describe(), self.num_chunks, self._has_sum()).peak
            as_a_whole = "as a whole" if self.num_chunks == 1 else f"in {self.num_chunks} chunks"
            return f"--swap-loss-chunks auto: the loss runs {as_a_whole} and takes {format_bytes(peak_bytes)}"
        if self._settings.loss_chunks is not None or budget_gib is None:
            return None
        model = self._describe()
        has_sum = self._has_sum()
        num_chunks = choose_num_chunks(model, has_sum)
        before_bytes, after_bytes = loss_bytes(model).peak, loss_bytes(model, num_chunks, has_sum).peak
        if before_bytes - after_bytes < WORTH * budget_gib * GIB:
            return None
        return (
            f"the loss takes {format_bytes(before_bytes)}. --swap-loss-chunks {num_chunks} would take "
            f"{format_bytes(after_bytes)} and compute the logits twice. Sums would differ in their last bits, so only "
            "the flag does it"
        )
