"""Collectives at the end of a run, over the run's default process group."""

from __future__ import annotations

import torch


def is_last_rank() -> bool:
    """Whether this is the last rank of the run, whose log Megatron prints."""
    return not torch.distributed.is_initialized() or (
        torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    )


def gather[T](item: T) -> list[T] | None:
    """Return ``item`` of every rank on rank 0, and None on the other ranks. Every rank must call this function."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return [item]
    items: list[T | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(items, item)
    return [item for item in items if item is not None] if torch.distributed.get_rank() == 0 else None
