"""Tells tensors whose bytes lie in their storage, where they can be copied, from all other kinds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of plain tensors. Subclasses may hold other tensors, and compute something else."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie in its storage, which counts changes in place.

    Subclasses are not plain. Of torch's own kinds these are not: sparse, nested, quantized, named, MKL-DNN's and
    inference tensors, tensors inside a transform of ``torch.func``, and zero tensors: their storage has no address.
    """
    if type(tensor) not in PLAIN or tensor.is_nested or tensor.is_quantized or tensor.has_names():
        return False
    try:  # every saved tensor passes here: no attribute that another one implies
        has_address = tensor._version >= 0 and tensor.data_ptr() != 0
        return has_address or tensor.is_meta or not tensor.untyped_storage().nbytes()  # or its owner has emptied it
    except RuntimeError:  # it has no version, or no storage
        return False


def addresses_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the storages of ``tensors``; some kinds, such as sparse ones, have none."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if torch._C._has_storage(tensor)}
