"""Small results for the host, written by a kernel: they wait for no copy."""

from __future__ import annotations

from typing import Any

import torch

from megatron.swap.common.types import SwapError

MOST_BYTES = 1 << 16  # a copy is faster beyond: a kernel's writes reach the host in small pieces


class _Mapped:
    """Pinned memory for a GPU's kernels, at the same address (unified virtual addressing)."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {**pinned.numpy().__array_interface__, "version": 3, "strides": None}


def can_write(tensor: Any) -> bool:
    """Whether ``write_to_host`` takes ``tensor``: a few integers on a GPU."""
    return (
        isinstance(tensor, torch.Tensor) and tensor.is_cuda
        and tensor.dtype in (torch.int32, torch.int64) and 0 < tensor.nbytes <= MOST_BYTES
    )  # fmt: skip


def write_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Write ``tensor``, accepted by ``can_write``, into pinned memory by a kernel of the current stream.

    Return that memory. As after ``tensor.to("cpu", non_blocking=True)``, the caller waits for the stream before reading
    it, and keeps it until then. Raises a ``SwapError`` if this torch copies pinned memory instead of addressing it.
    """
    # The allocator of pinned memory does not know of the kernel, and lends the memory again once the result is dropped.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)  # not the default device
    target = torch.as_tensor(_Mapped(pinned), device=tensor.device)
    if target.data_ptr() != pinned.data_ptr():
        raise SwapError("torch copied pinned memory, so that counts of tokens would not reach the host. Report this.")
    # A kernel, since all copies to the host share one hardware queue, whatever their streams. `copy_` would wait for
    # everything that is being offloaded.
    torch.add(tensor, 0, out=target)
    return pinned
