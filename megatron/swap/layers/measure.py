"""Runs of layers that need not be measured: two like them were, in the same forward, and the host has no room for more.

What the layers of a model save may be many times what host and device can hold (200 GiB in 80 layers of a 70B). Most
layers are alike, so a few of them show what all save. The others run in a checkpoint while steps are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import nn

from megatron.swap.devices.plain_tensors import is_plain
from megatron.swap.engine.handle import Alias
from megatron.swap.engine.producer_records import version_probe_of

LEAST_MEASURED = 2
"""Runs of a kind that are measured in each forward whatever the host has room for. The first differs from others where
the model holds its input."""


class AlikeRuns:
    """Says which runs of a forward are like some that were measured.

    Args:
        is_measuring: whether steps are measured now.
        has_room: whether the host has room for this many bytes more.
    """

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
        """Return the numbers of the measured runs that show what the next run of ``kind`` saves; none: measure it."""
        measured = self._measured.get(kind, [])
        if len(measured) < LEAST_MEASURED or self._has_room(self._num_bytes.get(kind, 0)):
            return ()
        if any(probe.changed() for probe in self._inputs[kind]):
            self.refuse(kind)  # the model changes what it has called such layers with
        return () if kind in self._unrepeatable else tuple(measured)

    def note(self, kind: Hashable, number: int, num_bytes: int, inputs: Iterable[torch.Tensor]) -> None:
        """Note that run ``number`` was measured.

        Args:
            num_bytes: that it offloads.
            inputs: what the layer was called with.
        """
        self._measured.setdefault(kind, []).append(number)
        self._inputs.setdefault(kind, []).extend(map(version_probe_of, inputs))
        self._num_bytes[kind] = num_bytes

    def refuse(self, kind: Hashable) -> None:
        """Note that runs of ``kind`` must not run again in backward."""
        self._unrepeatable.add(kind)


def kind_of(
    module: nn.Module, inputs: Iterable[torch.Tensor], did: Iterable[Hashable] | None, *others: Hashable
) -> Hashable:
    """Return what runs have in common that save tensors of the same sizes at the same sites.

    Args:
        module: the layer.
        inputs: what it is called with.
        did: the operators of its last run, with the shapes of what they made, or what it saved; ``None``: not known.
        others: further values that have to be equal.
    """
    return (
        type(module),
        tuple((name, *form_of(one)) for name, one in module.named_parameters()),
        tuple((name, *form_of(one)) for name, one in module.named_buffers()),
        tuple(map(form_of, inputs)),
        None if did is None else tuple(did),
        others,
    )


def form_of(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return what the bytes of ``tensor`` follow from, and whether it needs a gradient."""
    if not is_plain(tensor):
        return (type(tensor),)
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
