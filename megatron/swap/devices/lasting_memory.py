"""Device memory for tensors that last, apart from memory that comes and goes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MARGIN_BYTES = 64 << 20  # the allocator reserves whole segments

_here = threading.local()


def has_free(num_bytes: float) -> bool:
    """Return whether the allocator may reserve ``num_bytes`` more. True without CUDA."""
    if not torch.cuda.is_available():
        return True
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    allowed_bytes = torch.cuda.get_per_process_memory_fraction() * total_bytes - torch.cuda.memory_reserved()
    return min(free_bytes, allowed_bytes) >= num_bytes + MARGIN_BYTES


@contextmanager
def lasting_memory(num_bytes: float) -> Iterator[None]:
    """Let this thread allocate from a pool for lasting tensors, if the device has ``num_bytes`` left for the pool.

    Do nothing on a full device, with an allocator without pools, or within such a context. ``num_bytes`` is 0 if the
    pool has as much free memory already.
    """
    # A tensor made among the first activations and kept divides the memory that they leave, and later tensors must fit
    # into the gaps. 8B with FP8 copies of weights and 56 % of the optimizer state offloaded, one H200: the allocator
    # reserved 11 GiB more than was in use, and 3.6 GiB with these copies in a pool (docs/dev/fp8.md).
    if getattr(_here, "is_inside", False) or not _has_pool_for(num_bytes):
        yield
        return
    _here.is_inside = True
    try:
        with torch.cuda.use_mem_pool(_pool(torch.cuda.current_device())):
            yield
    finally:
        _here.is_inside = False


def _has_pool_for(num_bytes: float) -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_allocator_backend() != "native":
        return False
    # The pool cannot use memory that the allocator has cached for other tensors.
    return not num_bytes or has_free(num_bytes)


@functools.cache
def _pool(_: int) -> torch.cuda.MemPool:
    # One a device, never freed: tensors may outlive the run that made them.
    return torch.cuda.MemPool()
