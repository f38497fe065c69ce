"""A mapping of host memory that outlives its registration with CUDA."""

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
    """A private anonymous mapping that is not unmapped while it is registered with CUDA."""

    address = 0  # of the first byte
    device: int | None = None  # number of the CUDA device of the registration; None if not registered
    dropped: ClassVar[list[Mapping]] = []  # without references, still registered

    def __del__(self) -> None:
        # Unmapped memory must not stay registered: CUDA refuses the next mapping at its address (error 712).
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
    """Unregister and unmap the dropped mappings that are registered for CUDA device ``device``."""
    # A finalizer may call this in the middle of another call on this very thread, and would wait for itself.
    if not _releasing.acquire(blocking=False):
        return
    try:
        found = [mapping for mapping in list(Mapping.dropped) if mapping.device == device]
        if found:  # no tensor is left on the memory, so only copies under way may use it
            torch.cuda.synchronize(device)
        for mapping in found:
            mapping.unregister()
            Mapping.dropped.remove(mapping)
    finally:
        _releasing.release()


def _may_wait() -> bool:
    """Whether a finalizer may wait for the device."""
    if sys.is_finalizing() or torch.cuda.is_current_stream_capturing():
        return False
    # Beside other ranks the device may wait for a rank that waits for this thread.
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
