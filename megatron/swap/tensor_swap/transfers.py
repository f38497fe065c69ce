"""Copies between a storage and leased host memory, through two transfer queues, one for each direction."""

from __future__ import annotations

from enum import Enum

import torch

from megatron.swap.memory.host_pool import Lease
from megatron.swap.native.transfer_queue import CudaCopy, HostCopy, Step, TransferQueue


class Direction(Enum):
    """Direction of a copy: ``OUT`` offloads to the host, ``IN`` reloads to the device."""

    OUT = "out"
    IN = "in"


class Transfer:
    """One copy of a whole storage. ``Transfers`` makes transfers. Keep a transfer until its copy is over."""

    def __init__(
        self, queue: TransferQueue, job: list[Step], storage: torch.UntypedStorage, lease: Lease, events: Events | None
    ) -> None:
        # The copy runs by address, so these keep both sides alive.
        self.storage = storage
        self.lease = lease
        self._queue = queue
        self._job = job
        self._events = events
        self._ticket = -1

    def begin(self, *, ahead: bool) -> bool:
        """Enqueue the copy behind all others, or ``ahead`` of all that have not begun. Return whether it is ahead."""
        self._ticket = self._queue.push(self._job) if ahead else self._queue.enqueue(self._job)
        return ahead

    def erase(self) -> bool:
        """Withdraw the copy from the queue. Return whether it is withdrawn: false if it has begun."""
        return self._queue.erase(self._ticket)

    def is_done(self) -> bool:
        """Whether the copy is over, complete or failed."""
        return self._queue.is_done(self._ticket)

    def wait(self) -> None:
        """Wait until the copy is over. Raises its error if it failed."""
        self._queue.wait(self._ticket)

    def join(self) -> None:
        """Order the caller's stream behind the copy. Raises the copy's error if it failed."""
        # The host waits only until the copy is enqueued on the device.
        self._queue.wait_issued(self._ticket)
        if self._events is not None:
            self._events.join()


class Events:
    """Two events of a copy on a GPU: the copy waits for ``before``, and ``done`` is recorded behind it."""

    __slots__ = ("before", "done")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.before, self.done = torch.cuda.Event(), torch.cuda.Event()
        # Work on the caller's stream may still write the storage, or use the previous contents of its memory.
        self.before.record(torch.cuda.current_stream(stream.device))
        self.done.record(stream)  # an event has no address before its first record; the queue records it again

    def join(self) -> None:
        """Let the caller's stream wait for ``done``."""
        self.done.wait(torch.cuda.current_stream(self.done.device))


class Transfers:
    """The two transfer queues of one device, the CPU or a GPU. ``make_queue`` gets a queue's name."""

    def __init__(self, device: torch.device, make_queue: type[TransferQueue]) -> None:
        self._device = device
        self._queues = {way: make_queue(f"swap-{way.value}") for way in Direction}
        on_gpu = device.type == "cuda"
        self._streams = {way: torch.cuda.Stream(device) if on_gpu else None for way in Direction}
        for queue in self._queues.values():
            queue.start()

    def transfer(self, way: Direction, storage: torch.UntypedStorage, lease: Lease) -> Transfer:
        """Prepare a copy of all of ``storage`` to ``lease`` or from it. ``Transfer.begin`` enqueues the copy."""
        stream = self._streams[way]
        events = None if stream is None else Events(stream)
        address, job = storage.data_ptr(), list[Step]()
        for view in lease.views():
            num_bytes, host = view.numel(), view.data_ptr()
            target, source = (host, address) if way is Direction.OUT else (address, host)
            if stream is None or events is None:
                job.append(HostCopy(target, source, num_bytes))
            else:
                on_stream = stream.cuda_stream, events.before.cuda_event, events.done.cuda_event, stream.device.index
                job.append(CudaCopy(target, source, num_bytes, *on_stream))
            address += num_bytes
        return Transfer(self._queues[way], job, storage, lease, events)

    def wait_and_stop(self) -> None:
        """Finish all queued copies, and accept no more. Raises the first failure that was not raised yet."""
        first: Exception | None = None
        for queue in self._queues.values():
            try:
                queue.wait_and_stop()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first
