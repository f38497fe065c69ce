"""Small results for the host, written by a kernel: they wait for no copy."""

from __future__ import annotations

from typing import Any

import torch

from megatron.swap.common.types import SwapError

MOST_BYTES = 1 << 16
"""Beyond that a copy is faster: a kernel's writes reach the host in small pieces."""


class _Mapped:
    """Pinned memory as a GPU's kernels address it: by the same address (unified virtual addressing)."""

    def __init__(self, pinned: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {**pinned.numpy().__array_interface__, "version": 3, "strides": None}


def can_write(tensor: Any) -> bool:
    """Whether ``write_to_host`` takes ``tensor``: some whole numbers on a GPU."""
    return (
        isinstance(tensor, torch.Tensor) and tensor.is_cuda
        and tensor.dtype in (torch.int32, torch.int64) and 0 < tensor.nbytes <= MOST_BYTES
    )  # fmt: skip


def write_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Write ``tensor`` into pinned memory by a kernel of the current stream, and return that memory.

    All copies to the host share one hardware queue, whatever their streams, so a copy would wait for everything that is
    being offloaded. A kernel does not. As after ``tensor.to("cpu", non_blocking=True)``, the caller must wait for the
    stream before it reads. It must keep the result until then, too: the allocator of pinned memory does not know of
    the kernel, and would lend the memory again.

    Args:
        tensor: of any shape; one that ``can_write`` accepts.

    Raises:
        SwapError: this torch copies pinned memory instead of addressing it.
    """
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)  # not the default device
    target = torch.as_tensor(_Mapped(pinned), device=tensor.device)
    if target.data_ptr() != pinned.data_ptr():
        raise SwapError("torch copied pinned memory, so that counts of tokens would not reach the host. Report this.")
    torch.add(tensor, 0, out=target)  # copy_ would call the copy engine
    return pinned
