"""Runs of layers that need not be measured: one like them was, in the same forward, and the host has no room for more.

What the layers of a model save may be many times what host and device can hold (200 GiB in 80 layers of a 70B). Most
layers are alike, so a few of them show what all save. The others run in a checkpoint while steps are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from megatron.swap.engine.handle import Alias
from megatron.swap.engine.producer_records import version_probe_of

LEAST_MEASURED = 2
"""Runs of a kind that are measured in each forward whatever the host has room for. The first differs from others where
the model holds its input."""


class AlikeRuns:
    """Says which runs of a forward are like one that was measured.

    Args:
        has_room: whether the host has room for this many bytes more.
    """

    def __init__(self, has_room: Callable[[int], bool]) -> None:
        self._has_room = has_room
        self._measured: dict[Hashable, list[int]] = {}  # runs of this forward
        self._inputs: dict[Hashable, list[Alias]] = {}  # what these were called with
        self._num_bytes: dict[Hashable, int] = {}  # that a run offloads; 0: it must not run again

    def begin_forward(self) -> None:
        """Forget the runs of the forward before."""
        self._measured.clear()
        self._inputs.clear()

    def find(self, kind: Hashable) -> int | None:
        """Return the number of a measured run that stands for the next run of ``kind``; ``None``: measure that one."""
        if any(probe.changed() for probe in self._inputs.get(kind, ())):
            self._num_bytes[kind] = 0  # the model changes what it has called such layers with
        measured = self._measured.get(kind, [])
        num_bytes = self._num_bytes.get(kind, 0)
        if len(measured) < LEAST_MEASURED or not num_bytes or self._has_room(num_bytes):
            return None
        return measured[-1]

    def note(
        self, kind: Hashable, number: int, num_bytes: int, inputs: Iterable[torch.Tensor], *, is_repeatable: bool
    ) -> None:
        """Note that run ``number`` was measured, and offloads ``num_bytes``.

        Args:
            inputs: what the layer was called with.
            is_repeatable: it has left its inputs, its buffers and random state as they were.
        """
        self._measured.setdefault(kind, []).append(number)
        probes = self._inputs.setdefault(kind, [])
        probes += [version_probe_of(tensor) for tensor in inputs if not tensor.is_inference()]
        if self._num_bytes.get(kind) != 0:
            self._num_bytes[kind] = num_bytes if is_repeatable else 0


def kind_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], operators: list[Any] | None, *others: Hashable
) -> Hashable:
    """Return what runs have in common that save tensors of the same sizes at the same sites.

    Args:
        module: the layer.
        args, kwargs: what it is called with.
        operators: those of its last run; ``None``: not known.
        others: further values that have to be equal.
    """
    leaves, structure = _pytree.tree_flatten((args, kwargs))
    return (
        type(module),
        tuple((name, *_shape(one)) for name, one in module.named_parameters()),
        tuple((name, *_shape(one)) for name, one in module.named_buffers()),
        structure,
        tuple(_shape(leaf) if isinstance(leaf, torch.Tensor) else (type(leaf),) for leaf in leaves),
        None if operators is None else tuple(operators),
        others,
    )


def _shape(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    return type(tensor), tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
