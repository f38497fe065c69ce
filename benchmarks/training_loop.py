"""The parts of a training step that benchmarks of transformers models share: a loss in chunks, times, memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CHUNK = 4096
"""Tokens whose logits exist at once."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 2**30
OUT_OF_MEMORY = "out of memory"
"""The key of a row whose method does not fit the device."""


def loss_of(head: torch.nn.Module, hidden: torch.Tensor, tokens: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """Return the sum of the losses of all chunks, whose logits are computed again in backward."""

    def part(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(states).float(), labels, reduction="sum")

    pairs = zip(hidden[0].split(chunk), tokens[0].split(chunk), strict=True)
    return torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in pairs]).sum()


def timed(step: Callable[[], object], number: int) -> float:
    """Return the milliseconds that a step takes, of ``number`` steps in a row."""
    synchronize()
    start = time.perf_counter()
    for _ in range(number):
        step()
    synchronize()
    return 1e3 * (time.perf_counter() - start) / number


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peaks() -> dict[str, Any]:
    """Return the most device memory so far, allocated and reserved; 0 without a GPU."""
    on_gpu = DEVICE == "cuda"
    allocated, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (0, 0)
    return {"allocated_gib": round(allocated / GIB, 3), "peak_reserved_gib": round(reserved / GIB, 3)}
