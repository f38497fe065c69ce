"""Allocation of offloaded tensors: in host memory until it is full, then on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.swap.memory.disk_file import DiskFile, DiskRoom, padded
from megatron.swap.memory.host_arena import HostArena
from megatron.swap.optimizer.param_state import MAIN, OffloadedTensor, ParamState, placeholder


class TensorRequest(NamedTuple):
    """A request for an offloaded tensor of the parameter's shape."""

    param_state: ParamState
    name: str
    dtype: torch.dtype


class StateMemory:
    """Host memory and disk of all optimizers of a rank. A tensor's room stays allocated until training ends."""

    def __init__(self, arena: HostArena, disk: DiskFile | None = None) -> None:
        self.arena = arena
        self.disk = disk
        self.disk_bytes = 0  # bytes allocated on disk

    def tensor(self, param_state: ParamState, name: str, dtype: torch.dtype) -> OffloadedTensor:
        """Return the offloaded tensor ``name``, allocated at the first call. Raises as ``allocate``."""
        if name not in param_state.tensors:
            self.allocate([TensorRequest(param_state, name, dtype)])
        return param_state.tensors[name]

    def allocate(self, requests: Sequence[TensorRequest]) -> None:
        """Add the requested tensors to their parameters' states. Raises ``HostMemoryError`` or ``DiskError``."""
        sizes = [request.param_state.param.numel() * request.dtype.itemsize for request in requests]
        num_in_host = len(sizes) if self.disk is None else self.arena.num_that_fit(sizes)
        backings: list[torch.Tensor | DiskRoom] = [*self.arena.take_all(sizes[:num_in_host])]
        if self.disk is not None:
            backings += self.disk.take_all(sizes[num_in_host:])
            self.disk_bytes += sum(map(padded, sizes[num_in_host:]))
        for (param_state, name, dtype), backing in zip(requests, backings, strict=True):
            tensor = param_state.param if name == MAIN else placeholder(param_state.param, dtype)
            param_state.tensors[name] = OffloadedTensor(tensor, backing)
