"""Shared parts of the tests of tensor swapping: ways of copying, a transfer queue that shows its order, tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from megatron.swap.common.types import MIB
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.host_pool import HostPool
from megatron.swap.native.access import StorageAccess
from megatron.swap.native.build import load
from megatron.swap.native.transfer_queue import HostCopy, Step, TransferQueue
from megatron.swap.tensor_swap.swap import TensorSwap

HOST_GIB = 1 / 4
WAYS = ("queued", "direct")
"""How copies begin: with a compiler and without."""


def begin_copies(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Let each ``TensorSwap`` begin its copies in this way. Direct ones lag, and free host memory is poisoned."""
    if way == "queued":
        if load() is None:
            pytest.skip("needs a compiler")
        return
    monkeypatch.setattr("megatron.swap.tensor_swap.swap.load", lambda: None)
    monkeypatch.setattr("megatron.swap.native.access.load", lambda: None)
    monkeypatch.setattr("megatron.swap.tensor_swap.swap.storage_access", StorageAccess)
    monkeypatch.setattr("megatron.swap.tensor_swap.swap.HostPool", partial(HostPool, poison=True))
    monkeypatch.setattr("megatron.swap.tensor_swap.swap.SLAB_BYTES", MIB)
    monkeypatch.setattr("megatron.swap.tensor_swap.direct_transfers.EmulatedDevice", partial(EmulatedDevice, 0.002))


class OrderlyQueue(TransferQueue):
    """A queue that runs jobs only when a thread waits for one, on that thread, with all jobs before it: the order is
    visible."""

    made: list[OrderlyQueue]
    fails: set[tuple[str, int]]

    def __init__(self, name: str, num_in_flight: int = 2) -> None:
        self.name = name
        self.waiting: list[int] = []
        self.jobs: dict[int, Sequence[Step]] = {}
        self.order: list[int] = []
        self.errors: dict[int, Exception] = {}
        self.last = 0
        self.made.append(self)

    def start(self) -> None:
        pass

    def _add(self, job: Sequence[Step], at: int) -> int:
        self.last += 1
        self.jobs[self.last] = job
        self.waiting.insert(at, self.last)
        return self.last

    def enqueue(self, job: Sequence[Step]) -> int:
        return self._add(job, len(self.waiting))

    def push(self, job: Sequence[Step]) -> int:
        return self._add(job, 0)

    def erase(self, ticket: int) -> bool:
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            return True
        return False

    def is_done(self, ticket: int) -> bool:
        return ticket not in self.waiting

    def wait_issued(self, ticket: int) -> None:
        self.wait(ticket)

    def wait(self, ticket: int) -> None:
        while ticket in self.waiting:
            self._run(self.waiting.pop(0))
        if ticket in self.errors:
            raise self.errors.pop(ticket)

    def _run(self, ticket: int) -> None:
        self.order.append(ticket)
        if (self.name, ticket) in self.fails:
            self.errors[ticket] = OSError(28, "no space left")
            return
        for step in self.jobs[ticket]:
            assert isinstance(step, HostCopy)
            ctypes.memmove(step.target, step.source, step.num_bytes)

    def wait_all(self) -> None:
        while self.waiting:
            self._run(self.waiting.pop(0))
        if self.errors:
            raise self.errors.pop(min(self.errors))

    def wait_and_stop(self) -> None:
        self.wait_all()

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)


def leave(swap: TensorSwap, *tensors: torch.Tensor) -> None:
    swap.swap_out(*tensors)
    swap.wait_swapped_out()


def tensor(num_bytes: int = 1 << 16, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_bytes // 4, generator=torch.Generator().manual_seed(seed))
