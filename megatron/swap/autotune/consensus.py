"""Agreement of all ranks between steps: a few numbers each step, profiles and plans now and then.

The process group runs on the CPU (gloo), so that no rank waits for its device. One rank alone communicates nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron.swap.autotune.workload import Step

UNKNOWN_MS = float("inf")


class Ranks:
    """All ranks of the run. Every rank creates one at the same point, and calls the same methods in the same order."""

    def __init__(self) -> None:
        self._group: Any = None
        self.num_ranks = 1
        self.rank = 0
        if torch.distributed.is_initialized():
            self.num_ranks, self.rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            if self.num_ranks > 1:
                self._group = torch.distributed.new_group(backend="gloo")

    def worst(self, step: Step) -> Step:
        """Return ``step`` with the largest value of all ranks for each measurement; an unknown time stays unknown."""
        if self.num_ranks == 1:
            return step
        ms = UNKNOWN_MS if step.ms is None else step.ms
        figures = [ms, step.peak_gib, step.num_tensors, step.saved_mib, step.num_micro_batches, step.full_gib]
        most = torch.tensor(figures, dtype=torch.float64)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self._group)
        ms, peak_gib, num_tensors, saved_mib, num_micro_batches, full_gib = most.tolist()
        return replace(
            step,
            ms=None if ms == UNKNOWN_MS else ms,
            peak_gib=peak_gib,
            num_tensors=num_tensors,
            saved_mib=saved_mib,
            num_micro_batches=int(num_micro_batches),
            full_gib=full_gib,
        )

    def gather[T](self, item: T) -> list[T]:
        """Return ``item`` of every rank, in the order of ranks."""
        if self.num_ranks == 1:
            return [item]
        items: list[Any] = [None] * self.num_ranks
        torch.distributed.all_gather_object(items, item, group=self._group)
        return items
