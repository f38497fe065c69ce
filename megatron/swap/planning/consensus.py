"""Agreement of all ranks between steps: a few numbers each step, profiles and plans now and then.

The process group runs on the CPU (gloo), so that no rank waits for its device. An error on one rank ends all of them:
the failed rank still takes part in the collective, and tells the others why.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch

from megatron.swap.common.collectives import rank_and_world_size
from megatron.swap.common.types import SwapError
from megatron.swap.planning.workload import Step

UNKNOWN_MS = float("inf")
T = TypeVar("T")


class RankError(SwapError):
    """Another rank failed while all ranks agreed. The message quotes that rank's error."""


@dataclass(frozen=True)
class _Failed:
    """The error of a rank, which it sends in place of its result."""

    words: str


class Ranks:
    """All ranks of the run. Every rank creates one at the same point, and calls the same methods in the same order."""

    def __init__(self, timeout_minutes: float | None = None) -> None:
        self._group: Any = None
        self.rank, self.num_ranks = rank_and_world_size()
        if self.num_ranks > 1:
            # Torch has a default of its own.
            timeout = None if timeout_minutes is None else timedelta(minutes=timeout_minutes)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    def worst(self, measure: Callable[[], Step]) -> Step:
        """Return the measured step with the largest value of all ranks for each measurement. Raises as ``gather``."""
        if self.num_ranks == 1:
            return measure()
        failure: Exception | None = None
        figures = [0.0] * 6
        try:
            step = measure()
            ms = UNKNOWN_MS if step.ms is None else step.ms
            figures = [ms, step.peak_gib, step.num_tensors, step.saved_mib, step.num_micro_batches, step.full_gib]
        except Exception as error:
            failure = error
        most = torch.tensor([*figures, failure is not None], dtype=torch.float64)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self._group)
        ms, peak_gib, num_tensors, saved_mib, num_micro_batches, full_gib, has_failed = most.tolist()
        if has_failed:  # a second collective carries the error, which is no number
            self.gather(lambda: _result_or_raise(failure))
        return replace(
            step,
            ms=None if ms == UNKNOWN_MS else ms,  # a time that one rank does not know stays unknown
            peak_gib=peak_gib,
            num_tensors=num_tensors,
            saved_mib=saved_mib,
            num_micro_batches=int(num_micro_batches),
            full_gib=full_gib,
        )

    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Return the results of ``compute`` by rank. Raises its error, or ``RankError`` if another rank failed."""
        if self.num_ranks == 1:
            return [compute()]
        failure: Exception | None = None
        mine: Any = None
        try:
            mine = compute()
        except Exception as error:
            failure, mine = error, _Failed(f"{type(error).__name__}: {error}")
        items: list[Any] = [None] * self.num_ranks
        torch.distributed.all_gather_object(items, mine, group=self._group)
        if failure is not None:
            raise failure
        for rank, item in enumerate(items):
            if isinstance(item, _Failed):
                raise RankError(f"rank {rank} failed between two steps, so all ranks end. Its error: {item.words}")
        return items

    def all_or_none(self, compute: Callable[[], T]) -> T:
        """Return the result of ``compute`` on this rank, once it has succeeded on every rank. Raises as ``gather``."""
        if self.num_ranks == 1:
            return compute()
        found: list[T] = []
        self.gather(lambda: found.append(compute()))
        return found[0]


def _result_or_raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
