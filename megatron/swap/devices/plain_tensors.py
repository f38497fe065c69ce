"""Tells tensors whose bytes lie in their storage, where they can be copied, from all other kinds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Subclasses may hold other tensors, and compute something different.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
has_names = getattr(torch.Tensor, "has_names", lambda _: False)  # later versions of PyTorch know no names


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` lie in its storage, which counts changes in place.

    Subclasses are not plain. Neither are sparse, nested, quantized, named, MKL-DNN's, inference and zero tensors, nor
    tensors inside a transform of ``torch.func``: their storage has no address.
    """
    if type(tensor) not in PLAIN or tensor.is_nested or tensor.is_quantized or has_names(tensor):
        return False
    try:  # every saved tensor passes here, so no attribute is read that another attribute implies
        has_address = tensor._version >= 0 and tensor.data_ptr() != 0
        return has_address or tensor.is_meta or not tensor.untyped_storage().nbytes()  # or its owner has emptied it
    except RuntimeError:  # it has no version, or no storage
        return False


def addresses_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the storages of ``tensors``. Some kinds, such as sparse tensors, have none."""
    return {tensor.untyped_storage()._cdata for tensor in tensors if torch._C._has_storage(tensor)}
