"""Checksums of raw bytes, for ``--swap-verify``."""

from __future__ import annotations

import torch

from megatron.swap.common.types import SwapError

_BLOCK_BYTES = 64 << 10


class VerifyError(SwapError):
    """Reloaded or recomputed bytes differ from those that autograd saved."""


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Return sums of ``data`` (uint8, 1-D): one int64 for each block of 64 KiB, computed on its own device.

    One sum for each block, so that exchanged or shifted blocks are detected.
    """
    num_whole = data.numel() // _BLOCK_BYTES * _BLOCK_BYTES
    rest = data[num_whole:].sum(dtype=torch.int64).reshape(1)
    if num_whole == 0 or data.storage_offset() % 4:
        return rest if num_whole == 0 else torch.cat([_sums(data[:num_whole]), rest])
    return torch.cat([_sums(data[:num_whole].view(torch.int32)), rest])


def _sums(words: torch.Tensor) -> torch.Tensor:
    return words.view(-1, _BLOCK_BYTES // words.element_size()).sum(dim=1, dtype=torch.int64)
