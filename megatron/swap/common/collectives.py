"""This rank among all, and collectives at the end of a run, over the run's default process group."""

from typing import TypeVar

import torch

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks: 0 and 1 without a process group."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def gather(item: T) -> list[T] | None:
    """Return ``item`` of every rank on rank 0, and None on the other ranks. Every rank must call this function."""
    rank, world_size = rank_and_world_size()
    if world_size == 1:
        return [item]
    items: list[T | None] = [None] * world_size
    torch.distributed.all_gather_object(items, item)
    return [item for item in items if item is not None] if rank == 0 else None
