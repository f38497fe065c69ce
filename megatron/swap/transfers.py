"""Copies between a storage and leased host memory, through the transfer queues: one for each direction.

The queues work by themselves; on a GPU their copies are ordered with the caller's stream by events, as everywhere.
"""

from __future__ import annotations

from enum import Enum

import torch

from megatron.swap.host_pool import Lease
from megatron.swap.native.base import CudaCopy, HostCopy, Step, TransferQueue


class Direction(Enum):
    OUT = "out"
    IN = "in"


class Transfer:
    """One copy of a whole storage, on its way. Made by ``Transfers`` only.

    It holds both sides until nobody needs it any longer: the copy runs by address.
    """

    def __init__(
        self, queue: TransferQueue, job: list[Step], storage: torch.UntypedStorage, lease: Lease, events: Events
    ) -> None:
        self.storage = storage
        self.lease = lease
        self._queue = queue
        self._job = job
        self._events = events
        self._ticket = -1

    def begin(self, *, ahead: bool) -> None:
        """Into the queue: behind what is there, or ``ahead`` of all of it that has not begun."""
        self._ticket = self._queue.push(self._job) if ahead else self._queue.enqueue(self._job)

    def erase(self) -> bool:
        """Out of the queue again, if it has not begun; else ``False``."""
        return self._queue.erase(self._ticket)

    def is_done(self) -> bool:
        """Whether the copy is over, well or not."""
        return self._queue.is_done(self._ticket)

    def wait(self) -> None:
        """Until the copy is over. Raises: what made it fail, once."""
        self._queue.wait(self._ticket)

    def join(self) -> None:
        """What the caller's stream does from now on finds the copy done; the host waits as little as it can.

        Raises: what made it fail, once.
        """
        self._queue.wait_issued(self._ticket)
        self._events.join()


class Events:
    """On a GPU: ``before``, which the copy waits for, and ``done``, which is recorded behind it."""

    __slots__ = ("before", "done")

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.before: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None
        if stream is not None:
            self.before, self.done = torch.cuda.Event(), torch.cuda.Event()
            # What the caller's stream has still to do writes the storage, or uses what its memory was before.
            self.before.record(torch.cuda.current_stream(stream.device))
            self.done.record(stream)  # makes it; the queue records it anew

    def join(self) -> None:
        """The caller's stream waits for ``done``."""
        if self.done is not None:
            self.done.wait(torch.cuda.current_stream(self.done.device))


class Transfers:
    """Both queues of one device.

    Args:
        device: whose storages are copied; the CPU, or one GPU.
        make_queue: a queue by name.
    """

    def __init__(self, device: torch.device, make_queue: type[TransferQueue]) -> None:
        self._device = device
        self._queues = {way: make_queue(f"swap-{way.value}") for way in Direction}
        on_gpu = device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(device) if on_gpu else None for way in Direction}
        for queue in self._queues.values():
            queue.start()

    def transfer(self, way: Direction, storage: torch.UntypedStorage, lease: Lease) -> Transfer:
        """A copy of all of ``storage`` to ``lease``, or from it; it does not ``begin`` by itself."""
        stream = self._streams[way]
        events = Events(stream)
        address, job = storage.data_ptr(), list[Step]()
        for view in lease.views():
            num_bytes, host = view.numel(), view.data_ptr()
            target, source = (host, address) if way is Direction.OUT else (address, host)
            if stream is None:
                job.append(HostCopy(target, source, num_bytes))
            else:
                assert events.before is not None
                assert events.done is not None
                job.append(
                    CudaCopy(
                        target, source, num_bytes, stream.cuda_stream, events.before.cuda_event,
                        events.done.cuda_event, stream.device.index,
                    )
                )  # fmt: skip
            address += num_bytes
        return Transfer(self._queues[way], job, storage, lease, events)

    def wait_and_stop(self) -> None:
        """Everything that is queued is done, and nothing more is taken. Raises: the first failure nobody has seen."""
        first: Exception | None = None
        for queue in self._queues.values():
            try:
                queue.wait_and_stop()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
