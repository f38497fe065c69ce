"""A snapshot before a run of a layer. A layer that leaves all in it unchanged may run again in backward."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from megatron.swap.common.types import UsageError
from megatron.swap.devices.base import bytes_of

TORCH_S_OWN = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of modules that are compared in other ways, or not at all."""


class RunSnapshot:
    """Buffers, attributes, arguments and random state of Python and NumPy before a run of a layer.

    Of attributes, and of arguments that are objects, only their own items and attributes count, not what these hold.

    Args:
        module: the layer.
        args, kwargs: what it is called with.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._given = list(args), kwargs
        self._leaves, self._structure = _pytree.tree_flatten(self._given)
        read = [*(leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)), *module.parameters()]
        self._has_inference = any(tensor.is_inference() for tensor in read)
        self._versions = versions_of([*read, *module.buffers()])
        self._buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}
        self._objects = [*module.modules(), *(leaf for leaf in self._leaves if not isinstance(leaf, torch.Tensor))]
        self._held: list[Any] = []
        self._attributes = _attributes(self._objects, self._held)
        self._random = _random_state()

    def is_unchanged(self) -> bool:
        """Whether the run has left everything as it was. Inference tensors count as changed: nobody can tell."""
        leaves, structure = _pytree.tree_flatten(self._given)
        buffers = dict(self._module.named_buffers())
        return (
            not self._has_inference
            and structure == self._structure
            and all(map(_is_same, leaves, self._leaves))
            and all(tensor._version == version for tensor, version in self._versions)
            and self._random == _random_state()
            and self._attributes == _attributes(self._objects, [])
            and buffers.keys() == self._buffers.keys()
            and all(buffers[name] is one and _has_same_bytes(one, copy) for name, (one, copy) in self._buffers.items())
        )


def versions_of(tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return each tensor that counts its changes in place, with the count. Inference tensors do not count them."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def check_unchanged(versions: list[tuple[torch.Tensor, int]], layer: str) -> None:
    """Refuse to run ``layer`` again if a tensor that it was called with was changed in place since.

    Raises:
        UsageError: one was changed.
    """
    if any(tensor._version != version for tensor, version in versions):
        raise UsageError(
            f"{layer} is recomputed in backward, but a tensor that it was called with was changed in place since. Pass "
            "the layer a copy (tensor.clone()), or make a new tensor in each forward."
        )


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def _attributes(objects: list[Any], held: list[Any]) -> list[Any]:
    """Return what is equal as long as no attribute of ``objects`` changes, while ``held`` lives, which is added to."""
    return [
        (name, _identity(value, held))
        for one in objects if hasattr(one, "__dict__")
        for name, value in vars(one).items() if name not in TORCH_S_OWN
    ]  # fmt: skip


def _identity(value: Any, held: list[Any], is_item: bool = False) -> Any:
    """Return the text of a number or string, and the address of all else, with those of a collection's items."""
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    held.append(value)
    if is_item or type(value) not in (list, tuple, set, dict):
        return id(value)
    items = [*value, *value.values()] if type(value) is dict else value
    return id(value), [_identity(item, held, is_item=True) for item in items]


def _is_same(one: Any, other: Any) -> bool:
    return one is other


def _has_same_bytes(one: torch.Tensor, copy: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or one.layout is not torch.strided:
        return False  # a subclass may have bytes elsewhere
    if one.shape != copy.shape or one.dtype != copy.dtype or one.device != copy.device:
        return False
    if one.is_meta:
        return True  # it has no bytes, and versions count changes
    one, copy = (tensor.detach().contiguous().clone() for tensor in (one, copy))
    return torch.equal(bytes_of(one.untyped_storage()), bytes_of(copy.untyped_storage()))
