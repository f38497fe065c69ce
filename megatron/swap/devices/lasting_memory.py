"""Device memory for tensors that last, apart from what comes and goes.

A tensor that is made among the first activations and stays divides the memory that they free: later ones must fit into
the gaps. One H200, 8B with copies of weights in FP8 and 56 % of the optimizer state offloaded: the allocator reserved
11 GiB more than were in use (docs/dev/history.md, 2026-11-26).
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def lasting_memory() -> AbstractContextManager[Any]:
    """Return a context in which this thread allocates from a pool of the device's own for what lasts.

    Memory that is freed there is not used for anything else. Without CUDA nothing changes.
    """
    if not torch.cuda.is_available():
        return nullcontext()
    return torch.cuda.use_mem_pool(_pool(torch.cuda.current_device()))


@functools.cache
def _pool(_: int) -> torch.cuda.MemPool:
    """Return the pool of a device. It is never freed, since tensors may outlive the run that made them."""
    return torch.cuda.MemPool()
