"""The dry device: the meta device of PyTorch, whose tensors have no bytes, with a clock and a count of memory.

Nothing is computed. Whoever runs operators on it says how long each takes and which storages it makes, and a step then
looks to a recorder as on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NoReturn

import torch

from megatron.swap.common.types import SwapError
from megatron.swap.devices.base import Stream
from megatron.swap.devices.dry_allocator import Block, DryAllocator
from megatron.swap.devices.emulated import EmulatedDevice


class DryMark:
    """A moment of a dry device's clock."""

    def __init__(self, now_ms: float) -> None:
        self._now_ms = now_ms

    def elapsed_ms_since(self, other: DryMark) -> float:
        return self._now_ms - other._now_ms


class DryDevice(EmulatedDevice):
    """A device without bytes. What is saved on it must be kept: there is nothing to copy.

    Args:
        name: of the hardware that it stands for.
        expandable: the allocator is set to ``expandable_segments:True``.
    """

    def __init__(self, name: str, expandable: bool = False) -> None:
        super().__init__()
        self.torch_device = torch.device("meta")
        self.name = name
        self.keeps_time = True
        self._now_ms = 0.0
        self._held_bytes = self._peak_bytes = self._recent_peak_bytes = 0
        self._held: set[int] = set()
        self._allocator = DryAllocator(expandable)

    def run(self, ms: float, workspace_bytes: int = 0) -> None:
        """Advance the clock by an operator that takes ``ms`` and, while it runs, ``workspace_bytes`` of memory."""
        self._now_ms += ms
        if workspace_bytes:
            self._free(self._count(workspace_bytes))

    def take(self, num_bytes: int) -> None:
        """Count ``num_bytes`` from now on: what a library takes from PyTorch's allocator, and keeps."""
        self._count(num_bytes)

    def hold(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage``, in blocks of the allocator, from now until it is freed. A second call does nothing."""
        address = storage._cdata
        if address in self._held or not storage.nbytes():
            return
        block = self._count(storage.nbytes())

        def free() -> None:
            self._held.discard(address)
            self._free(block)

        weakref.finalize(storage, free).atexit = False
        self._held.add(address)

    def allocate(self, num_bytes: int) -> NoReturn:
        raise SwapError(f"{num_bytes} bytes are to be reloaded on a dry device, which has none: keep what is saved.")

    def copy(self, stream: Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> NoReturn:
        raise SwapError("a copy on a dry device, which has no bytes: keep what is saved.")

    def _count(self, num_bytes: int) -> Block:
        block = self._allocator.allocate(num_bytes)
        self._held_bytes += block.num_bytes
        self._recent_peak_bytes = max(self._recent_peak_bytes, self._held_bytes)
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        return block

    def _free(self, block: Block) -> None:
        self._held_bytes -= block.num_bytes
        self._allocator.free(block)

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def allocated_bytes(self) -> int:  # type: ignore[override]
        return self._held_bytes

    def reserved_bytes(self) -> int:  # type: ignore[override]
        return self._allocator.reserved_bytes

    def peak_reserved_bytes(self) -> int:  # type: ignore[override]
        return self._allocator.reserved_bytes

    def release_cached(self) -> None:
        self._allocator.release_cached()

    def take_peak(self) -> tuple[int, int]:  # type: ignore[override]
        peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, self._held_bytes
        return peak_bytes, self._held_bytes

    def mark(self) -> DryMark:  # type: ignore[override]
        return DryMark(self._now_ms)
