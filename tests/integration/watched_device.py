"""An emulated device that ends a run whose copies do not wait for compute.

Compute on the emulated device is the calling thread, so a copy that does not wait for it finds its bytes all the same.
On a GPU it may run before the kernel that writes its source, or into memory that a kernel still reads.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from megatron.swap.common.types import SwapError
from megatron.swap.devices.emulated import ComputeStream, CopyStream, EmulatedDevice


class WatchedDevice(EmulatedDevice):
    """Knows how far each stream has waited for compute: up to some memory that was taken, and some node of autograd."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_taken = 0
        self._taken: dict[int, int] = {}  # address of the memory → number of takings before it and with it
        self._recorded: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._waited: dict[CopyStream, tuple[int, int]] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        tensor = super().allocate(num_bytes)
        self._num_taken += 1
        self._taken[tensor.untyped_storage().data_ptr()] = self._num_taken
        return tensor

    def record(self, stream: Any) -> Any:
        event = super().record(stream)
        if isinstance(stream, ComputeStream):
            self._recorded[event] = self._num_taken, _get_sequence_nr()
        return event

    def wait(self, stream: Any, event: Any) -> None:
        super().wait(stream, event)
        if isinstance(stream, CopyStream) and event in self._recorded:
            self._waited[stream] = max(self._waited.get(stream, (0, 0)), self._recorded[event])

    def copy(self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> int:
        num_taken, sequence = self._waited.get(stream, (-1, -1))
        taken = max((self._taken.get(target.untyped_storage().data_ptr(), 0) for target in targets), default=0)
        if stream.direction == "HtoD" and num_taken < taken:
            raise SwapError("a copy into memory that was just taken does not wait for compute, which may read it still")
        if stream.direction == "DtoH" and sequence < _get_sequence_nr():
            raise SwapError("a copy does not wait for compute, which may not have written its source yet")
        return super().copy(stream, targets, sources)
