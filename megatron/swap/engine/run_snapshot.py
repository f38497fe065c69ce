"""A snapshot before a run of a layer, while steps are measured: a run that changes nothing may run again."""

from __future__ import annotations

import pickle
import random
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from megatron.swap.engine.checksum import is_bytes
from megatron.swap.engine.layer_state import MAX_BYTES, StateReader


class RunSnapshot:
    """The state that a run reads, its arguments and random states before it. Holds the arguments: drop it after."""

    def __init__(self, reader: StateReader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = list(args), kwargs
        self._leaves, self._structure = _pytree.tree_flatten(self._given)
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        # Without tensors among the arguments: their versions are read below.
        self.state = reader.read(leaf for leaf in self._leaves if not isinstance(leaf, torch.Tensor))
        self._has_uncounted = self.state.has_uncounted or any(tensor.is_inference() for tensor in tensors)
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        # Versions do not count what is changed by ``.data``. Weights are left out, and what is as large as these.
        self._copies = [
            (tensor, tensor.detach().clone()) for tensor in self.state.tensors()
            if type(tensor) is torch.Tensor and is_bytes(tensor) and tensor.nbytes <= MAX_BYTES
        ]  # fmt: skip
        self._random = _random_state()

    def is_unchanged(self) -> bool:
        """Whether the run has left everything as it was. Inference tensors count as changed: they have no version."""
        leaves, structure = _pytree.tree_flatten(self._given)
        return (
            not self._has_uncounted
            and structure == self._structure
            and all(map(is_, leaves, self._leaves))
            and all(tensor._version == version for tensor, version in self._versions)
            and self._random == _random_state()
            and not self.state.changes()
            and all(_has_same_bytes(tensor, copy) for tensor, copy in self._copies)
        )

def _random_state() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def _has_same_bytes(one: torch.Tensor, copy: torch.Tensor) -> bool:
    if one.shape != copy.shape or one.dtype != copy.dtype:
        return False
    one, copy = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one.detach(), copy))
    return torch.equal(one, copy)
