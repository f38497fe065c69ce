"""Checksums of tensors on their own device: for ``--swap-verify``, and for layers that run again."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.swap.common.types import SwapError
from megatron.swap.devices.plain_tensors import is_plain

_BLOCK_BYTES = 64 << 10
_NUM_PARTS = 127
"""Odd, so that equal changes in all parts do not cancel."""
_ALIGNMENT = 4
"""Words at which parts begin, so that a GPU reads several at once."""
_SMALL = 8192
"""Words of a tensor that is its own fingerprint."""


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


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return sums over all bytes of ``tensor``, which ``is_bytes``: 1-D, int64, on its device. Call it under no_grad.

    The bytes are words in ``_NUM_PARTS`` equal parts, which overlap, and each sum is of the words at one place of all
    parts. So a word that moves is found, unless it moves by a multiple of the distance between parts. That has no
    common factor above 4 with the length of a row, so no row of more than 4 KiB moves so, and a shorter one only by
    certain numbers of rows. The sums take 1 % of the bytes. It reads the tensor once, and copies it only if it is small
    or if its elements have no order without gaps. It is one kernel: each takes the host 5 us and the device 3, and a
    layer that runs again has two fingerprints.
    """
    words, row = _words(tensor)
    if words.numel() <= _SMALL:
        return words.to(torch.int64, copy=True)
    distance = (words.numel() // _NUM_PARTS // _ALIGNMENT - 1 | 1) * _ALIGNMENT  # times an odd number
    while gcd(distance, row) > _ALIGNMENT or words.numel() % distance == 0:  # else a roll by it would move whole parts
        distance -= 2 * _ALIGNMENT
    length = words.numel() - (_NUM_PARTS - 1) * distance
    parts = words.as_strided((_NUM_PARTS, length), (distance, 1), words.storage_offset())
    return parts.sum(0, dtype=torch.int64)


def _words(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the bytes of ``tensor`` as 1-D words: of 8 bytes if they can be, else of one element, or of one byte.

    Also returns how many of these a row has: the elements that are next to each other.
    """
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
    """Return sums of the values of a floating-point ``tensor`` along its last dimension, and along all others: fp32.

    They differ a little where values do. Call it under no_grad.
    """
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
    """Yield what ``tensor`` consists of: itself, or the inner tensors of a wrapper; nothing for other kinds."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts_of(getattr(tensor, name))
    elif is_bytes(tensor):
        yield tensor
