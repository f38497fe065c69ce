"""Checksums of tensors on their own device: for ``--swap-verify``, and for layers that run again."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.swap.common.types import SwapError
from megatron.swap.devices.plain_tensors import is_plain

_BLOCK_BYTES = 64 << 10
_NUM_PARTS = 127  # odd, so that equal changes in all parts do not cancel
_ALIGNMENT = 4  # words at which parts begin, so that a GPU reads several at once
_SMALL = 8192  # words of a tensor that is its own fingerprint


class VerifyError(SwapError):
    """Reloaded or recomputed bytes differ from those that autograd saved."""


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Return one int64 sum for each block of 64 KiB of ``data`` (uint8, whole storage), computed on its device."""
    # One sum for each block, so that exchanged or shifted blocks are detected.
    num_whole = data.numel() // _BLOCK_BYTES * _BLOCK_BYTES
    rest = data[num_whole:].sum(dtype=torch.int64).reshape(1)
    if num_whole == 0:
        return rest
    words = data[:num_whole].view(torch.int32).view(-1, _BLOCK_BYTES // 4)
    return torch.cat([words.sum(dim=1, dtype=torch.int64), rest])


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over all bytes of ``tensor`` (``is_bytes``): 1-D, int64, on its device. Call it under no_grad."""
    words, row = _words(tensor)
    if words.numel() <= _SMALL:
        return words.to(torch.int64, copy=True)
    # The words lie in overlapping parts. Each sum adds the words at one place of all parts, and all sums take 1 % of
    # the bytes. A moved word is found unless it moves by a multiple of the distance between parts. This distance and
    # the row length have no common factor above 4: no row over 4 KiB moves unseen, and a shorter row only by certain
    # numbers of rows.
    distance = (words.numel() // _NUM_PARTS // _ALIGNMENT - 1 | 1) * _ALIGNMENT  # times an odd number
    while gcd(distance, row) > _ALIGNMENT or words.numel() % distance == 0:  # else a roll by it would move whole parts
        distance -= 2 * _ALIGNMENT
    length = words.numel() - (_NUM_PARTS - 1) * distance
    parts = words.as_strided((_NUM_PARTS, length), (distance, 1), words.storage_offset())
    # One kernel: 5 us on the host, 3 us on the device. A layer that runs again has two fingerprints.
    return parts.sum(0, dtype=torch.int64)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bytes of ``tensor`` as 1-D words, and the number of words in a row. Copies only tensors with gaps."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        strides = tensor.stride()
        if 0 in strides:  # it was expanded: its elements are there once
            tensor = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order).contiguous()  # a transposed tensor is not copied
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).flatten(-2)
    size = tensor.element_size()
    is_whole = tensor.storage_offset() * size % 8 == 0 and tensor.numel() * size % 8 == 0
    row = tensor.shape[-1] if tensor.dim() else 1
    if is_whole:
        return tensor.view(-1).view(torch.int64), max(1, row * size // 8)
    return tensor.view(-1).view(_WORDS[size]), row


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return fp32 sums of ``tensor`` along its last and along all other dimensions. Call it under no_grad."""
    if tensor.dim() < 2:
        return tensor.reshape(-1).float()
    by_row = tensor.sum(-1, dtype=torch.float32).reshape(-1)
    return torch.cat([by_row, tensor.sum(tuple(range(tensor.dim() - 1)), dtype=torch.float32)])


def is_bytes(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is plain bytes in memory that can be read: its owner has not emptied it."""
    if not is_plain(tensor) or tensor.is_meta or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() > 0


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``tensor``, or the inner tensors of a wrapper. Yield nothing for other kinds."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif is_bytes(tensor):
        yield tensor
