"""What all ranks of a run agree on between steps: a few numbers each step, profiles and plans once in a while.

The group is one of the CPU's: nothing waits for the device. With one rank nothing is sent at all.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.swap.stages import Step

UNKNOWN_MS = float("inf")


class Ranks:
    """All ranks of the run; every rank makes one at the same point, and calls the same in the same order."""

    def __init__(self) -> None:
        self._group: Any = None
        self.number = 0
        self.rank = 0
        if torch.distributed.is_initialized():
            self.number, self.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            if self.number > 1:
                self._group = torch.distributed.new_group(backend="gloo")
        self.number = max(1, self.number)

    def worst(self, step: Step) -> Step:
        """``step`` as the worst rank saw it."""
        if self.number == 1:
            return step
        ms = UNKNOWN_MS if step.ms is None else step.ms
        figures = [ms, step.peak_gib, step.num_tensors, step.saved_mib, step.num_micro_batches, step.full_gib]
        most = torch.tensor(figures, dtype=torch.float64)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self._group)
        ms, peak_gib, num_tensors, saved_mib, num_micro_batches, full_gib = most.tolist()
        known_ms = None if ms == UNKNOWN_MS else ms
        return Step(step.number, known_ms, peak_gib, num_tensors, saved_mib, int(num_micro_batches), full_gib)

    def gather[T](self, item: T) -> list[T]:
        """``item`` of every rank, by rank."""
        if self.number == 1:
            return [item]
        items: list[Any] = [None] * self.number
        torch.distributed.all_gather_object(items, item, group=self._group)
        return items


def is_last_rank() -> bool:
    """Of the run: the one whose log Megatron prints."""
    return not torch.distributed.is_initialized() or (
        torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    )


def gather[T](item: T) -> list[T] | None:
    """``item`` of every rank, on rank 0; ``None`` elsewhere. At the end of a run: by the run's own group."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [item]
    items: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return [item for item in items if item is not None] if torch.distributed.get_rank() == 0 else None
