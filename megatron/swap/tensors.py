"""Swapping tensor by tensor, for people who write their own models, and for what autograd cannot see.

::

    with TensorSwap() as swap:
        swap.swap_out(a)                  # now, ahead of what is queued
        swap.queue_swap_out(b, c)         # behind it
        swap.wait_swapped_out()           # their device memory is free
        ...
        swap.queue_prefetch(a, b)         # noted
        swap.start_prefetches()           # on their way
        c.sum()                           # comes back by itself, ahead of a and b

What moves is a tensor's *storage*: views and aliases stay valid, since they share it. A storage that is out is empty.
Whatever operation the dispatcher sees (on this thread, and in the backward that it starts) brings its tensors back
first. What it does not see - kernels that an extension calls by itself, TransformerEngine's for one - asks with
``resident``; without, reading raises an error.

``docs/tensors.md`` has the whole interface, and the names that other systems gave to its parts.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron.swap.host_memory import HostMemoryError
from megatron.swap.host_pool import HostPool
from megatron.swap.native.access import storage_access
from megatron.swap.native.base import TransferQueue
from megatron.swap.native.queue import queue_class
from megatron.swap.operations import Addresses, Operations, storage_of
from megatron.swap.storage_mover import State, StorageMover
from megatron.swap.transfers import Transfers
from megatron.swap.types import GIB, MIB, MOST, SwapError, UsageError, format_bytes, is_within

SLAB_BYTES = 64 * MIB
"""Host memory is booked in such pieces, or in larger ones for larger tensors."""


@dataclass(frozen=True)
class TensorStats:
    """What one ``TensorSwap`` has done so far.

    Attributes:
        out_bytes, in_bytes: copied. What was called back before it had left does not count.
        num_passive: swap-ins that an operation had to wait for: what it touched was out, or not yet back.
        num_recalled: swap-outs that an operation stopped, touching the tensor first.
        host_bytes, host_peak_bytes: leased now, and the most.
    """

    out_bytes: int
    in_bytes: int
    num_passive: int
    num_recalled: int
    host_bytes: int
    host_peak_bytes: int


class TensorSwap:
    """Moves the tensors of one device, told one by one. A context: opened by ``with``, or by ``open`` and ``close``.

    Not for several threads at once, but for the threads on which autograd runs a backward.

    Args:
        host_gib: most pinned host memory, in GiB.
        device: of the tensors; by default the current GPU, the CPU where there is none.
        queue: makes the transfer queues; by default the native ones, where they can be built.
    """

    def __init__(
        self, host_gib: float, device: torch.device | str | None = None, queue: type[TransferQueue] | None = None
    ) -> None:
        if not is_within(MIB / GIB, host_gib, MOST):
            raise UsageError(f"TensorSwap(host_gib={host_gib!r}): a number from {MIB / GIB:.4f} (1 MiB) on is expected")
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = _with_index(torch.device(default if device is None else device))
        if self.device.type not in ("cuda", "cpu"):
            raise UsageError(f"TensorSwap(device={self.device}): cuda or cpu is expected")
        self._host_gib = host_gib
        self._make_queue = queue_class() if queue is None else queue
        self._access = storage_access()
        self._wanted: list[weakref.ref[torch.UntypedStorage]] = []
        self._modes: ExitStack | None = None
        self._accepts = False

    # ------------------------------------------------------------------ open and close

    def open(self) -> TensorSwap:
        """From now on tensors may be told to leave. Raises: ``SwapError`` if it is open already."""
        if self._modes is not None:
            raise SwapError("TensorSwap is open already: close it first, or make another one")
        on_gpu = self.device.type == "cuda"
        index = self.device.index if on_gpu else None
        self._pool = HostPool(
            limit_bytes=int(self._host_gib * GIB), pinned=on_gpu, slab_bytes=SLAB_BYTES, device=index
        )
        self._transfers = Transfers(self.device, self._make_queue)
        self._mover = StorageMover(self.device, self._pool, self._transfers, self._access)
        self._process = os.getpid()
        self._operations = Operations(self._before_use)
        self._modes = ExitStack()
        self._modes.enter_context(Addresses(self._before_use))
        self._modes.enter_context(self._operations)
        self._modes.callback(self._access.on_use(id(self), self._mover.bring_back))
        self._accepts = True
        return self

    def close(self) -> None:
        """Stop, bring everything back, and let go of host memory; a second call does nothing.

        Raises:
            SwapError: on another thread than ``open``, or before another mode that was entered later.
            torch.OutOfMemoryError: not everything fits the device, or what made a copy in fail. It is still open, takes
                no more, and ``close`` may be called again.
            Exception: what made a copy out fail; it is closed, and every tensor is on the device.
        """
        if self._modes is None:
            return
        if _get_current_dispatch_mode() is not self._operations:
            raise SwapError(
                "TensorSwap is to be closed on the thread that opened it, and what was opened later (another one, or "
                "any other dispatch mode) before it"
            )
        failure: Exception | None = None
        try:
            self.stop()
        except Exception as error:
            failure = error
        self._mover.return_all()
        self._modes.close()
        self._modes = None
        self._mover.wait()  # before the memory that copies read is gone
        self._transfers.wait_and_stop()
        self._pool.close(force=True)
        if failure is not None:
            raise failure

    def __enter__(self) -> TensorSwap:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ out

    def swap_out(self, *tensors: torch.Tensor) -> None:
        """Begin to swap out now, ahead of what is queued. Their memory is free when ``wait_swapped_out`` returns.

        Raises:
            UsageError: a tensor cannot be swapped; nothing was begun.
            HostMemoryError: host memory does not suffice; for some of them it may have.
            SwapError: not open, or stopped; or a C++ operator uses one of them.
        """
        for storage in reversed(self._storages(tensors)):  # each goes to the head: the first given is ahead of the rest
            self._leave(storage, ahead=True)

    def queue_swap_out(self, *tensors: torch.Tensor) -> None:
        """The same, behind what is queued."""
        for storage in self._storages(tensors):
            self._leave(storage, ahead=False)

    def wait_swapped_out(self) -> None:
        """Until everything that was told to leave has left, its memory on the device free.

        Raises: what made a copy fail, when all are over; those tensors stayed where they were.
        """
        self._check_open()
        self._mover.wait_left()

    # ------------------------------------------------------------------ in

    def queue_prefetch(self, *tensors: torch.Tensor) -> None:
        """Note that they are wanted next, in this order; ``start_prefetches`` begins. Those on the device are skipped.

        Raises: as ``swap_out``.
        """
        for storage in self._storages(tensors):
            if self._mover.state(storage) is not None:
                self._wanted.append(weakref.ref(storage))

    def start_prefetches(self) -> None:
        """Give all that were noted memory on the device, and begin to copy, in their order.

        Raises:
            torch.OutOfMemoryError: for one there is no memory; it and those behind it remain noted.
        """
        self._check_open()
        while self._wanted:
            storage = self._wanted[0]()
            if storage is not None:
                self._mover.begin_return(storage)
            del self._wanted[0]

    def cancel(self, *tensors: torch.Tensor) -> None:
        """Take back what has not begun: a swap-out, or a prefetch. What is under way goes on."""
        for storage in self._storages(tensors):
            self._wanted = [wanted for wanted in self._wanted if wanted() is not storage]
            self._mover.cancel(storage)

    def wait(self) -> None:
        """Until all that is queued or under way is done, both ways; prefetches that were noted are started.

        Raises: what made a copy fail, when all are over.
        """
        self._check_open()
        self.start_prefetches()
        self._mover.wait()

    def stop(self) -> None:
        """Accept nothing more, and finish what is queued. What is out comes back when it is touched, or by ``close``.

        Raises: as ``wait``.
        """
        self._check_open()
        self._accepts = False
        self._wanted.clear()
        self.wait()

    def resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself, on the device until it is told to leave: for what the dispatcher cannot see."""
        self._check_open()
        self._before_use([tensor])
        return tensor

    def is_out(self, tensor: torch.Tensor) -> bool:
        """Whether its memory on the device is free."""
        self._check_open()
        return isinstance(tensor, torch.Tensor) and self._mover.state(storage_of(tensor)) is State.OUT

    @property
    def stats(self) -> TensorStats:
        """Since it was opened. Raises: ``SwapError``, if it is not open."""
        self._check_open()
        mover, pool = self._mover, self._pool.stats
        return TensorStats(
            mover.out_bytes, mover.in_bytes, mover.num_passive, mover.num_recalled, pool.leased_bytes,
            pool.leased_peak_bytes,
        )  # fmt: skip

    def _before_use(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operation is about to use ``tensors``, on the current stream."""
        if self._mover.is_idle:
            return
        self._check_process()
        for tensor in tensors:
            if tensor.device == self.device and tensor.layout is torch.strided:
                self._mover.need(storage_of(tensor))
        self._mover.see_to_copies()

    def _leave(self, storage: torch.UntypedStorage, *, ahead: bool) -> None:
        self._wanted = [wanted for wanted in self._wanted if wanted() is not storage]  # that was before
        try:
            self._mover.leave(storage, ahead=ahead)
        except HostMemoryError as error:
            raise HostMemoryError(
                f"no host memory for {format_bytes(storage.nbytes())} more: TensorSwap(host_gib={self._host_gib:g}), "
                f"of which {format_bytes(self._pool.stats.leased_bytes)} are in use. Raise host_gib, or let fewer "
                f"tensors leave. ({error})"
            ) from error

    # ------------------------------------------------------------------ checks

    def _storages(self, tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Of ``tensors``, each once, empty ones left out. Raises: as ``swap_out``."""
        self._check_open()
        if not self._accepts:
            raise SwapError("TensorSwap was stopped: it takes no more tensors. Open another one.")
        found = {}
        for tensor in tensors:
            storage = self._storage_of(tensor)
            if storage is not None:
                found[storage._cdata] = storage
        return list(found.values())

    def _storage_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"a torch.Tensor is expected, {type(tensor).__name__} was given")
        what = f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} cannot be swapped"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UsageError(f"{what}: it is a {type(tensor).__name__}. Give the plain tensors that it is made of.")
        if tensor.layout is not torch.strided:
            raise UsageError(f"{what}: its layout is {tensor.layout}. Only dense ones can.")
        if tensor.device != self.device:
            raise UsageError(f"{what}: it is on {tensor.device}, this TensorSwap moves those of {self.device}.")
        storage = storage_of(tensor)
        if self._mover.state(storage) is not None:
            return storage
        if self._access.is_refused(storage):
            raise UsageError(f"{what}: another TensorSwap moves it.")
        if storage.nbytes() == 0:
            if tensor.numel():
                raise UsageError(f"{what}: its storage is empty (resize_).")
            return None
        if not storage.resizable() or (self.device.type == "cpu" and storage.is_shared()):
            raise UsageError(f"{what}: its memory is not PyTorch's own (numpy's, shared, a file's). Clone it first.")
        return storage

    def _check_open(self) -> None:
        if self._modes is None:
            raise SwapError("TensorSwap is not open: use it as a context (with TensorSwap(…) as swap), or call open()")
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SwapError(
                "a process that was forked while a TensorSwap was open uses its tensors: the copies, their threads and "
                "their memory are its parent's. Fork before, or close it first."
            )


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
