"""Runs of layers that are not measured: two like them were, in the same forward, and the host has no room for more.

A model's layers may save many times the bytes of host and device (200 GiB in 80 layers of a 70B). Most layers are
alike, so a few of them show the others' saved tensors. The others run in a checkpoint while steps are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import nn

from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.handle import Alias
from megatron.swap.engine.producer_records import version_probe_of

# Measure at least two runs of each kind in each forward, even if host memory is full. One is not enough: the model
# often still holds the first layer's input, so that layer frees less.
LEAST_MEASURED = 2


class AlikeRuns:
    """Tells which runs of a forward are like measured ones. ``has_room`` asks the host for that many bytes more."""

    def __init__(self, is_measuring: Callable[[], bool], has_room: Callable[[int], bool]) -> None:
        self.is_measuring = is_measuring
        self._has_room = has_room
        self._measured: dict[Hashable, list[int]] = {}  # runs of this forward
        self._inputs: dict[Hashable, list[Alias]] = {}  # what these were called with
        self._num_bytes: dict[Hashable, int] = {}  # that a run offloads
        self._unrepeatable: set[Hashable] = set()

    def begin_forward(self) -> None:
        """Forget the runs of the forward before."""
        self._measured.clear()
        self._inputs.clear()

    def find(self, kind: Hashable) -> tuple[int, ...]:
        """Return the numbers of the measured runs that stand for the next run of ``kind``; none: measure it."""
        measured = self._measured.get(kind, [])
        if len(measured) < LEAST_MEASURED or self._has_room(self._num_bytes.get(kind, 0)):
            return ()
        if any(probe.changed() for probe in self._inputs[kind]):
            self.refuse(kind)  # the model changes what it has called such layers with
        return () if kind in self._unrepeatable else tuple(measured)

    def note(self, kind: Hashable, number: int, num_bytes: int, inputs: Iterable[torch.Tensor]) -> None:
        """Note that run ``number`` was measured: it was called with ``inputs`` and offloads ``num_bytes``."""
        self._measured.setdefault(kind, []).append(number)
        self._inputs.setdefault(kind, []).extend(map(version_probe_of, inputs))
        self._num_bytes[kind] = num_bytes

    def refuse(self, kind: Hashable) -> None:
        """Note that runs of ``kind`` must not run again in backward."""
        self._unrepeatable.add(kind)


def kind_of(
    module: nn.Module, inputs: Iterable[torch.Tensor], did: Iterable[Hashable] | None, *others: Hashable
) -> Hashable:
    """Return a value that is equal for runs that save alike. ``did`` is from ``Makers.did``, or None if unknown."""
    parameters = tuple((name, *form_of(one)) for name, one in module.named_parameters())
    buffers = tuple((name, *form_of(one)) for name, one in module.named_buffers())
    done = None if did is None else tuple(did)
    return type(module), parameters, buffers, tuple(map(form_of, inputs)), done, others


def form_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return the facts that determine the bytes of ``tensor``, and whether it needs a gradient."""
    if not is_plain(tensor):
        return (type(tensor),)
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
