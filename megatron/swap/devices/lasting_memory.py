"""Device memory for tensors that last, apart from those that come and go.

A tensor that is made among the first activations and stays there divides the memory that those leave, and later ones
must fit into the gaps. One H200, 8B with copies of weights in FP8 and 56 % of the optimizer state offloaded: the
allocator reserved 11 GiB more than was in use, and 3.6 GiB with these copies apart (docs/dev/fp8.md).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.swap.devices.free_memory import has_free

_here = threading.local()


@contextmanager
def lasting_memory(num_bytes: float) -> Iterator[None]:
    """Let this thread allocate from a pool for what lasts, if the device has ``num_bytes`` left for it.

    ``num_bytes`` 0: as much was freed in the pool before.

    The pool cannot use what the allocator has cached for other tensors, nor they what is freed in the pool. So nothing
    changes where the device is full, nor with an allocator that has no pools, nor within such a context.
    """
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
    return not num_bytes or has_free(num_bytes)


@functools.cache
def _pool(_: int) -> torch.cuda.MemPool:
    """Return the pool of a device. It is never freed, since tensors may outlive the run that made them."""
    return torch.cuda.MemPool()
