"""A mapping of host memory that stays as long as it is registered with CUDA."""

from __future__ import annotations

import mmap
import sys
import threading
from contextlib import suppress
from typing import ClassVar

import torch

from megatron.swap.common.log import logger
from megatron.swap.native.cuda_library import clear_cuda_error


class Mapping(mmap.mmap):
    """A private anonymous mapping that is not unmapped while it is registered with CUDA.

    CUDA would refuse the next mapping at the same address (error 712). When the last reference to a registered mapping
    is dropped, ``release_dropped`` unregisters it: at once, or when memory is registered for its device the next time.

    Attributes:
        address: of its first byte.
        device: number of the CUDA device that it is registered for; None: it is not registered.
        dropped: mappings that nobody refers to any more, still registered.
    """

    address = 0
    device: int | None = None
    dropped: ClassVar[list[Mapping]] = []

    def __del__(self) -> None:
        if self.device is not None:
            self.dropped.append(self)
            with suppress(RuntimeError):  # of a broken device
                if _may_wait():
                    release_dropped(self.device)

    def unregister(self) -> None:
        """End the registration, if there is one. No copy of this memory may be under way."""
        if self.device is None:
            return
        device, self.device = self.device, None
        with torch.cuda.device(device):
            status = torch.cuda.cudart().cudaHostUnregister(self.address)
        if int(status) != 0:
            clear_cuda_error()
            logger.warning("cudaHostUnregister failed with CUDA error %d", int(status))


_releasing = threading.Lock()


def release_dropped(device: int) -> None:
    """Unregister and unmap the mappings that were dropped while they were registered for CUDA device ``device``.

    No tensor on them is left, so no further copy can begin; waiting for the device ends the copies under way. The call
    does nothing amid another one, which a finalizer may have interrupted on this very thread.
    """
    if not _releasing.acquire(blocking=False):
        return
    try:
        found = [mapping for mapping in list(Mapping.dropped) if mapping.device == device]
        if found:
            torch.cuda.synchronize(device)
        for mapping in found:
            mapping.unregister()
            Mapping.dropped.remove(mapping)
    finally:
        _releasing.release()


def _may_wait() -> bool:
    """Whether a finalizer, which runs on any thread at any moment, may wait for the device.

    Not when the interpreter ends, not while a CUDA graph is captured, and not beside other ranks: the device may be
    waiting for one that waits for this thread.
    """
    if sys.is_finalizing() or torch.cuda.is_current_stream_capturing():
        return False
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
