"""Copies between a storage and leased host memory that begin at once, where the transfer queue cannot be built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.swap.devices.base import Device, Event, Stream, bytes_of
from megatron.swap.devices.cuda import CudaDevice
from megatron.swap.devices.emulated import EmulatedDevice
from megatron.swap.memory.host_pool import Lease
from megatron.swap.tensor_swap.transfers import Direction


class DirectTransfer:
    """One copy of a whole storage, with the methods of ``Transfer``. Keep it until the copy is over."""

    def __init__(
        self, device: Device, stream: Stream, way: Direction, storage: torch.UntypedStorage, lease: Lease
    ) -> None:
        self.storage = storage  # these keep both sides alive
        self.lease = lease
        self._device = device
        self._stream = stream
        self._way = way
        self._done: Event | None = None
        self._failure: Exception | None = None

    def begin(self, *, ahead: bool) -> bool:
        """Enqueue the copy on the device, and return False: no copy goes ``ahead`` of others."""
        device, stream = self._device, self._stream
        # Work on the caller's stream may still write the storage, or use the previous contents of its memory.
        device.wait(stream, device.record(device.current_stream()))
        try:
            with _unseen():
                host = self.lease.views()
                data = bytes_of(self.storage).split([view.numel() for view in host])
                device.copy(stream, *((host, data) if self._way is Direction.OUT else (data, host)))
        except Exception as error:  # raised by `wait` and `join`, after which the memory of both sides is reused
            self._failure = error.with_traceback(None)  # the frames hold the storage
            device.synchronize()  # a part of the copy may be under way
        self._done = device.record(stream)
        return False

    def erase(self) -> bool:
        return False

    def is_done(self) -> bool:
        """Whether the copy is over, complete or failed, or ``begin`` was interrupted."""
        return self._done is None or self._device.has_passed(self._done)

    def wait(self) -> None:
        """Wait until the copy is over. Raises its error if it failed."""
        if self._done is not None:
            self._device.finish(self._done)  # the host waits
        self._raise_failure()

    def join(self) -> None:
        """Order the caller's stream behind the copy. Raises its error if it failed."""
        if self._done is not None:
            self._device.wait(self._device.current_stream(), self._done)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class DirectTransfers:
    """The two copy streams of one device, the CPU or a GPU, with the methods of ``Transfers``."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._device: Device = CudaDevice()
        else:
            self._device = EmulatedDevice()
        self._streams = {way: self._device.copy_stream(way.value) for way in Direction}

    def transfer(self, way: Direction, storage: torch.UntypedStorage, lease: Lease) -> DirectTransfer:
        """Prepare a copy of all of ``storage`` to ``lease`` or from it. ``DirectTransfer.begin`` enqueues the copy."""
        return DirectTransfer(self._device, self._streams[way], way, storage, lease)

    def wait_and_stop(self) -> None:
        self._device.close()


@contextmanager
def _unseen() -> Iterator[None]:
    # The modes of `TensorSwap` would see the copy's operations, and reload the storage. Inference mode, because slabs
    # that were made in it refuse writes outside.
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.inference_mode():
        yield
