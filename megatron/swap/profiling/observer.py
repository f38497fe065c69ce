"""Counts the bytes that autograd holds on the device at once. An independent check: it knows nothing of swapping.

It wraps any pair of saved-tensor hooks and notes each storage that is packed or unpacked. The storage counts from then
until it is freed. So an offloaded storage stops counting exactly when its device memory is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Hooks:
    """A pair of saved-tensor hooks."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


PLAIN = Hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
"""Hooks that keep every tensor. They detach it, since a node that saves its own output would otherwise never die."""


class Observer:
    """Counts the live bytes of the storages that passed through its hooks, parameters excepted.

    Attributes:
        live_bytes: bytes held now.
        peak_bytes: most bytes held at once.
    """

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._recent_peak_bytes = 0
        self._constant: set[int] = set()
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def around(self, hooks: Hooks) -> Hooks:
        """Return ``hooks`` with counting around them."""

        def pack(tensor: torch.Tensor) -> Any:
            self._note(tensor)
            return hooks.pack(tensor)

        def unpack(packed: Any) -> torch.Tensor:
            tensor = hooks.unpack(packed)
            self._note(tensor)
            return tensor

        return Hooks(pack, unpack)

    def context(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which everything that autograd saves is counted, and nothing else changes.

        The parameters of ``module``, and views of them, do not count: they exist without autograd.
        """
        self._constant = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        hooks = self.around(PLAIN)
        return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)

    def take_peak(self) -> tuple[int, int]:
        """Return the most bytes held at once since the last call, and the bytes held now."""
        peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, self.live_bytes
        return peak_bytes, self.live_bytes

    def _note(self, tensor: torch.Tensor) -> None:
        if type(tensor) is not torch.Tensor:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live or address in self._constant:
            return
        num_bytes = storage.nbytes()

        # The reference dies with the storage itself: torch keeps the Python object alive as long.
        def gone(reference: weakref.ref[torch.UntypedStorage]) -> None:
            entry = self._live.get(address)
            if entry is not None and entry[0] is reference:
                del self._live[address]
            self.live_bytes -= num_bytes

        self._live[address] = (weakref.ref(storage, gone), num_bytes)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, self.live_bytes)
